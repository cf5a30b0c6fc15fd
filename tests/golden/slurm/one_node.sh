#!/bin/bash
# quickstart: 2 ranks on 1 node, by srun.
#SBATCH --job-name=quickstart
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --requeue
#SBATCH --output="/runs/a b/logs/executor.log"
#SBATCH --open-mode=append
#SBATCH --export=HOME,LANG,LOGNAME,PATH,USER

run='/runs/a b'
plan_sha256=5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a
python=/venv/bin/python
start='/runs/a b/lib'/launcher/runtime/process/start.py
starter=srun
continuation=requeue
max_starts=8
max_node_failures=5
max_restarts=0
saves=no
save_lead_s=0
lead_is_set=no
last_checkpoint=step-00000150
nodes=1
spare_nodes=0
checks_nodes=yes
excludes_nodes=yes
check_timeout_s=120
device=cpu
needs=(memory_bytes=28971008 disk_bytes=67108864 scratch_bytes=67108864 min_speed=0.5)
ranks_per_node=2
components=1
host_suffix=''
resume=()
step=()

unfinished=75 # the exit code of a job whose run can be resumed; both starters hide those of the ranks
say() { # with the time, as ranks and launcher write it
  echo "$(date -u +%FT%T.%3NZ) trireme: $*"
}

fail() {
  say "$*" >&2
  exit 1
}

# Each start of the ranks, by this job or another one of the run, is a line in logs/starts. The exit/ folder
# of the previous start is moved aside.
restart=${SLURM_RESTART_COUNT:-0}
again=${TRIREME_START_AGAIN:-0} # within one start of the job, after the crash of a node that it has a spare for
this_start=$SLURM_JOB_ID.$restart
if [ "$again" != 0 ]; then this_start+=.$again; fi
# The id of this job in Slurm's commands: the id of an array is also that of one of its tasks.
job_id=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job_id=${job_id:-$SLURM_JOB_ID}
[ -d "$run" ] || fail "there is no $run on $(hostname): is its file system mounted?"
if [ -e "$run/exit/finished" ]; then
  say "the run is finished, so job $job_id has nothing to start"
  exit 0
fi

# The lock of the run directory (launcher/base/lock.py). A start of this job follows the one before, which has
# ended. Whoever else holds it is waited for until the counter in the file stands still, or the file is gone, as
# it is once the job is submitted: a long chain of jobs takes minutes. Ranks that are left anywhere see by the
# token that they are no longer the run's, and end.
lock=$run/lock
TRIREME_LOCK=$(od -An -N16 -tx8 /dev/urandom | tr -d ' \n')
export TRIREME_LOCK
take_lock() {
  local held before='' still=0 waited=0
  while held=$(cat "$lock" 2>/dev/null); do
    case $held in *"\"job\": \"$job_id\""*) break ;; esac
    if [ "$held" = "$before" ]; then still=$((still + 1)); else still=0; fi
    [ "$still" -lt 15 ] || break
    [ "$waited" -lt 900 ] || fail "$run is in use, which job $job_id has waited 15 min for: $held"
    waited=$((waited + 1)) before=$held
    sleep 1
  done
  local content='{"token": "%s", "host": "%s", "system": "", "pid": %d, "birth": "", "job": "%s", '
  content+='"since": "%s", "beat": "%016d"}\n'
  (
    umask 077
    printf "$content" "$TRIREME_LOCK" "$(hostname)" $$ "$job_id" "$(date +%Y-%m-%dT%H:%M:%S%:z)" 0 >"$lock.new"
  ) && mv -f "$lock.new" "$lock" || fail "cannot write $lock on $(hostname)"
}
take_lock

mkdir -p "$run/logs"
before=$(tail -n 1 "$run/logs/starts" 2>/dev/null)
[ -z "$before" ] || mv "$run/exit" "$run/exit.$before"
mkdir -p "$run/exit"
echo "$this_start" >>"$run/logs/starts"
printf '{"time": %s, "job": "%s"}\n' "$(date +%s)" "$job_id" >"$run/exit/start.json"
num_starts=$(wc -l <"$run/logs/starts")

# An event of the run (launcher/contract/alarms/events.py). A killed writer may have left half a line.
events=$run/events.jsonl
write_event() { # KIND SENTENCE [NODE]
  [ -z "$(tail -c 1 "$events" 2>/dev/null)" ] || echo >>"$events"
  printf '{"time": "%s", "kind": "%s", "node": "%s", "done": "%s"}\n' \
    "$(date +%Y-%m-%dT%H:%M:%S%:z)" "$1" "${3:-}" "${2//[\"\\]/ }" >>"$events"
}
num_event_bytes=$(stat -c %s "$events" 2>/dev/null || echo 0)
write_event start "job $job_id, start $num_starts"

has_lock() {
  grep -qs "$TRIREME_LOCK" "$lock"
}

# How the job ended, for a cluster that does not keep records of its jobs. Where another start has the lock by
# now, the record is its.
end_record() {
  has_lock || return
  if [ -e "$run/exit/finished" ]; then
    write_event succeeded "job $job_id"
  elif [ -e "$run/exit/stopped.json" ]; then
    write_event stopped "job $job_id: the ranks have saved"
  elif [ "$1" != "$unfinished" ] || [ ! -e "$run/exit/again" ]; then
    write_event failed "job $job_id ended with code $1$(sed 's/^/: /' "$run/exit/unfit" 2>/dev/null)"
  fi
  printf '{"job": "%s", "exit_code": %s}\n' "$job_id" "$1" >"$run/exit/job.json"
  rm -f "$lock"
  [ -z "${notifier:-}" ] || wait "$notifier"
}
trap 'end_record $?' EXIT
# A signal that ends this shell would put 0 into that record.
end_by() {
  end_record $((128 + $1))
  trap - EXIT "$1"
  kill -"$1" $$
}
for signal in 1 10 12 15; do trap "end_by $signal" "$signal"; done # HUP, USR1, USR2, TERM

export OMP_NUM_THREADS=1
export PYTHONDONTWRITEBYTECODE=1
export PYTHONSAFEPATH=1
export PYTHONUNBUFFERED=1

# The end of this job's time, as its own script sees it: how long before it the ranks have to be told follows
# from how long they take to save, and a save that takes even longer must not be the end of the run.

# Seconds until Slurm ends this job; nothing where it has no limit, or Slurm does not answer.
time_left() {
  local end
  end=$(SLURM_TIME_FORMAT=standard scontrol --oneliner show job "$job_id" 2>/dev/null |
    sed -n '1s/.* EndTime=\([0-9][^ ]*\).*/\1/p')
  if [ -n "$end" ] && end=$(date -d "$end" +%s); then echo $((end - $(date +%s))); fi
}

# The state in what Slurm tells of a job, of several components that of the first; RUNNING where it does not
# answer.
state_in() {
  local state
  state=$(sed -n 's/.* JobState=\([A-Z_]*\).*/\1/p' <<<"$1")
  state=${state%%$'\n'*}
  echo "${state:-RUNNING}"
}

# Seconds that the ranks need, by what has been measured: by them, and by saves that came too late.
needed() {
  echo $(($(sort -n "$run/save_times" 2>/dev/null | sed -n '$s/ .*//p') + 0))
}

# Seconds before the end at which the ranks are told, at most half of the time that this start has.
lead() {
  local lead=$save_lead_s
  if [ "$lead_is_set" = no ] && [ "$(needed)" -gt "$lead" ]; then lead=$(needed); fi
  echo $((time == 0 || lead <= time / 2 ? lead : time / 2))
}

# Has a function watch the time in the background, in place of the one before.
watch_with() {
  stop_watch
  "$@" &
  watch=$!
}
stop_watch() {
  if [ -n "$watch" ]; then kill "$watch" 2>/dev/null; fi
}

# Waits until at most as many seconds are left as a command says: meanwhile the limit may be changed, and more
# may be needed. Where nothing is known of a limit, there may be one later.
until_left() {
  local left wait_s nap=
  trap 'kill "$nap" 2>/dev/null; exit' TERM
  until left=$(time_left) && [ -n "$left" ] && [ "$left" -le "$("$@")" ]; do
    wait_s=300
    if [ -n "$left" ]; then wait_s=$(((left - $("$@") + 1) / 2)); fi
    sleep "$wait_s" >/dev/null 2>&1 &
    nap=$!
    wait "$nap"
  done
}

# Signals this script in time. Slurm does so, too, but it may be before a signal is heard, or too late for
# this run.
signal_in_time() {
  time=$(($(time_left) + 0))
  if [ "$(needed)" -gt "$(lead)" ]; then
    say "executor.save_lead_s=$save_lead_s is too short: as measured, the ranks need $(needed) s to save"
  fi
  until_left lead
  kill -USR1 $$
}

# Requeues the job shortly before its end, while the ranks are still saving. It goes on from the checkpoint
# before. The next start tells its ranks earlier. A job that is cancelled ends at once and stays ended.
requeue_unsaved() {
  local given margin
  given=$(($(time_left) + 0))
  margin=$((given < 80 ? given / 4 : 20))
  until_left echo "$margin"
  has_lock && [ "$(state_in "$(scontrol --oneliner show job "$job_id")")" = RUNNING ] || return
  say "the ranks have not saved within $((given - margin)) s, $margin s before the end of the job:" \
    "executor.save_lead_s has to be longer"
  echo "$((2 * given)) late" >>"$run/save_times"
  touch "$run/exit/late"
  start_again
}

# Slurm signals this shell when the time limit is near (USR1) and when the job has to end (TERM). The
# signal is forwarded to the ranks, which save after their current step, leave a note, and end. A rank
# that is still starting ignores it, so it is repeated until they have ended.
note=$run/exit/stopped.json
ranks='' watch='' num_signals=0 log_bytes=0
on_signal() {
  num_signals=$((num_signals + 1))
  if [ "$num_signals" = 1 ] && [ -n "$ranks" ]; then
    signal_ranks 0 >/dev/null 2>&1 &
    watch_with requeue_unsaved
  fi
}
signal_ranks() {
  sleep "$1"
  while kill -USR1 "$ranks"; do sleep 2; done
}
if [ "$saves" = yes ]; then trap on_signal USR1 TERM; fi

# Gives the events to the command of run.notify and the figures to run.prometheus, until this script has
# recorded its end.
if [ "${is_followed:-no}" = yes ]; then
  "$python" "$start" launcher.app.beside.on_node "$run/plan.json" "$num_event_bytes" </dev/null &
  notifier=$!
fi

# Starts the ranks and waits for their end, also when a signal arrives. A rank that fails ends the others
# at once (--kill-on-bad-exit); one that finishes before them does not (--wait=0).
start_ranks() {
  local num_before=$num_signals
  log_bytes=$(stat -c %s "$run/logs/executor.log" 2>/dev/null)
  "$@" &
  ranks=$!
  if [ "$num_before" != 0 ]; then
    signal_ranks 5 >/dev/null 2>&1 & # srun has to have started, too
    watch_with requeue_unsaved
  elif [ "$save_lead_s" != 0 ]; then
    watch_with signal_in_time
  fi
  until
    num_before=$num_signals
    wait "$ranks"
    rc=$?
    [ "$num_before" = "$num_signals" ]
  do :; done
}

# Ends this start, and has another one follow where the run can be resumed. A job that Slurm has requeued,
# as it does after a preemption or the loss of a node, or has cancelled, is left to Slurm.
conclude() {
  stop_watch
  has_lock || fail "another start has $run by now, or its file system is not mounted on $(hostname)"
  [ "$rc" != 0 ] || [ -e "$note" ] || finish
  local job state cause='' unfit
  job=$(scontrol --oneliner show job "$job_id")
  state=$(state_in "$job")
  # When a job is preempted, Slurm signals its steps, but not this script: ranks that cannot save yet end.
  case $job in *" PreemptTime="[0-9]*) num_signals=$((num_signals + 1)) cause=preempted ;; esac
  [ "$cause" != preempted ] || touch "$run/exit/preempted"
  # A signal may also end ranks that have saved the last step: nothing is left to train.
  if [ "$num_signals" != 0 ] && [ -e "$run/checkpoints/$last_checkpoint" ]; then finish; fi
  if [ "$state" != RUNNING ]; then
    say "leaves job $job_id to Slurm, where it is $state"
    if [ "$state" = CANCELLED ]; then goes_on cancelled "job $job_id"; else goes_on requeue "job $job_id, by Slurm"; fi
  elif [ -e "$note" ] || [ "$num_signals" != 0 ]; then
    start_again "$cause"
  elif has_lost_nodes "$job"; then
    start_over "$(nodes_in "$job")"
  elif unfit=$(unstarted_nodes) && [ -n "$unfit" ]; then
    leave_nodes
  else
    echo "$this_start" >>"$run/logs/failures"
    if has_failed; then cancel_rest; else start_again; fi
    exit "$rc"
  fi
  exit "$unfinished"
}

has_failed() {
  [ -e "$run/logs/failures" ] && [ "$(wc -l <"$run/logs/failures")" -gt "$max_restarts" ]
}

# Notes that this start has ended otherwise than by a failure, once.
goes_on() {
  [ -e "$run/exit/again" ] || write_event "$@"
  echo "$1" >"$run/exit/again"
}

# In a chain, the next job starts when this one ends with another code than 0. What the run itself asks for is
# counted, in logs/requeues; what Slurm requeues, and what gives way to another job or its nodes end, is not.
# $1: why it does not count.
start_again() {
  case $continuation in
    none) return 1 ;;
    chain)
      local rest
      mapfile -t rest < <(rest_of_chain)
      exclude_nodes "${rest[@]}"
      [ "${#rest[@]}" != 0 ] || return
      goes_on restart "job ${rest[0]} of the chain"
      return
      ;;
  esac
  local counted
  counted=$(($(cat "$run/logs/requeues" 2>/dev/null | wc -l) + 1))
  if [ -z "${1:-}" ] && [ "$counted" -ge "$max_starts" ]; then
    say "not requeued after start $num_starts: $counted of at most $max_starts count" \
      "(executor.max_starts)"
    return 1
  fi
  say "requeues job $job_id after start $num_starts"
  goes_on requeue "job $job_id after start $num_starts"
  if [ -z "${1:-}" ]; then echo "$this_start" >>"$run/logs/requeues"; fi
  trap '' TERM # which the requeued job's script is sent
  scontrol requeue "$job_id"
  exclude_nodes "$job_id"
}

# Ends the job of a run that is finished. No later start of it does anything: see start.sh.
finish() {
  touch "$run/exit/finished"
  cancel_rest
  exit 0
}

# The jobs of the chain behind this one.
rest_of_chain() {
  if [ "$continuation" = chain ]; then awk -v job="$SLURM_JOB_ID" 'seen; $0 == job { seen = 1 }' "$run/logs/chain" 2>/dev/null; fi
}

# Cancels them, the last one first: one that is cancelled would let the next one start.
cancel_rest() {
  local rest i
  mapfile -t rest < <(rest_of_chain)
  for ((i = ${#rest[@]} - 1; i >= 0; i--)); do scancel --quiet "${rest[i]}"; done
}

# What neither the run itself nor a preemption has ended, and nothing more was saved since: nodes have failed, or
# somebody requeues it before it can save.
has_lost_start() { # START
  ! [ -e "$run/exit.$1/stopped.json" ] && ! [ -e "$run/exit.$1/preempted" ] &&
    ! grep -qsFx "$1" "$run/logs/requeues" "$run/logs/failures"
}
if [ "$continuation" = requeue ]; then
  checkpoints=("$run"/checkpoints/step-????????)
  saved=${checkpoints[-1]##*-}
  if [ -n "$before" ] && has_lost_start "$before"; then echo "$before $saved" >>"$run/logs/lost"; fi
  if num_lost=$(grep -c " $saved$" "$run/logs/lost" 2>/dev/null) && [ "$num_lost" -ge "$max_node_failures" ]; then
    echo "$num_lost starts in a row were ended by their nodes, and nothing more was saved" \
      "(executor.max_node_failures); nodes that were seen to fail are in logs/unfit-nodes" >"$run/exit/unfit"
    fail "$(cat "$run/exit/unfit")"
  fi
fi

if [ "$continuation" = chain ] && has_failed; then # before this job of the chain could be cancelled
  cancel_rest
  fail "the run has already failed (executor.max_restarts=$max_restarts)"
fi

# The nodes that the ranks are started on: the first ones of the allocation that are fit, by a short check of
# each. A node that is not is named, and the job does not get it again.
hosts=() place=() nodelist=${SLURM_JOB_NODELIST:-}

names_of() {
  scontrol show hostnames "$1" 2>/dev/null || "$python" "$start" launcher_plugins.executors.slurm.nodelist "$1"
}

joined() {
  local IFS=,
  echo "$*"
}

# Runs a command once on each node of a list, for as long as a check may take. One that does not answer does
# not end it on the others. Slurm may hold a step of a crashed node for running, so steps have to overlap.
on_each() {
  local nodelist=$1 num_nodes=$2
  shift 2
  timeout --kill-after=5 "$check_timeout_s" srun --overlap --export=ALL --no-kill --kill-on-bad-exit=0 --wait=0 \
    --nodelist="$nodelist" --nodes="$num_nodes" --ntasks="$num_nodes" --ntasks-per-node=1 "$@"
}

# Prints the unfit nodes, each with the reason. Those that do not even tell the time are left out of what
# measures the others. The time is asked for in a step of its own, which leaves little of it in between.
check_nodes() {
  local answers first_s last_s answering task
  first_s=$(date +%s)
  answers=$(on_each "$(joined "${hosts[@]}")" "${#hosts[@]}" bash -c 'echo "$SLURMD_NODENAME clock_s $(date +%s)"')
  last_s=$(date +%s)
  mapfile -t answering < <(sed -n 's/ clock_s .*//p' <<<"$answers")
  task='exec "$@" --node "$SLURMD_NODENAME" --index "$SLURM_PROCID"'
  if [ "${#answering[@]}" != 0 ]; then
    find_port
    answers+=$'\n'$(on_each "$(joined "${answering[@]}")" "${#answering[@]}" "${step[@]}" bash -c "$task" check \
      "$python" "$start" launcher.runtime.measure.node_check --run "$run" --device "$device" \
      --meet "${hosts[0]}$host_suffix:$MASTER_PORT" --num-nodes "${#answering[@]}" --limit-s "$check_timeout_s")
  fi
  srun --overlap --export=ALL --nodes=1 --ntasks=1 --ntasks-per-node=1 --nodelist="${hosts[0]}" "${step[@]}" \
    "$python" "$start" launcher_plugins.executors.slurm.nodes "$run" "$(joined "${hosts[@]}")" \
    "$first_s" "$last_s" "${needs[@]}" <<<"$answers"
}

choose_nodes() {
  local unfit fit=() host reason all=$((nodes + spare_nodes)) given=${SLURM_JOB_NUM_NODES:-none}
  [ "$given" = "$all" ] || { [ "$again" != 0 ] && [ "$given" -ge "$nodes" ]; } ||
    fail "the plan needs $all nodes, and Slurm gave $given"
  [ "$checks_nodes" = yes ] || return 0
  mapfile -t hosts < <(names_of "$nodelist")
  unfit=$(check_nodes) ||
    fail "the nodes of this job cannot be checked; executor.check_nodes=false starts it without that"
  for host in "${hosts[@]}"; do
    reason=$(sed -n "s/^$host //p" <<<"$unfit")
    if [ -z "$reason" ]; then
      fit+=("$host")
    else
      name_unfit "$host" "$reason"
    fi
  done
  if [ "${#fit[@]}" -lt "$nodes" ]; then give_up; fi
  nodelist=$(joined "${fit[@]:0:nodes}")
  if [ "$spare_nodes" != 0 ]; then place=(--overlap "--nodelist=$nodelist"); fi
}

name_unfit() {
  say "node $1 is unfit: $2"
  write_event unfit_node "node $1 is unfit: $2" "$1"
  printf '%s %s %s\n' "$1" "$(date +%FT%T%z)" "$2" >>"$run/logs/unfit-nodes"
}

# Has the job start on other nodes, unless it is the run that no node is fit for. $1: why that does not count.
give_up() {
  echo "too few nodes are fit: ${unfit//$'\n'/; }" >"$run/exit/unfit"
  if [ "$excludes_nodes" = yes ] && { [ "${#fit[@]}" != 0 ] || [ "${#hosts[@]}" = 1 ]; } && start_again "${1:-}"; then
    exit "$unfinished"
  fi
  fail "$(cat "$run/exit/unfit")"
}

# Keeps unfit nodes from what has not started yet: this job once it is requeued, the next ones of a chain.
# Slurm takes no such change for a job that runs.
exclude_nodes() {
  local job before unfit
  unfit=$(cut -d ' ' -f 1 "$run/logs/unfit-nodes" 2>/dev/null | sort -u | paste -sd ,)
  [ "$excludes_nodes" = yes ] && [ -n "$unfit" ] || return 0
  for job in "$@"; do
    before=$(scontrol --oneliner show job "$job" | sed -n '1s/.* ExcNodeList=\([^ (]*\).*/\1/p')
    if scontrol update JobId="$job" ExcNodeList="${before:+$before,}$unfit"; then
      say "job $job does not get $unfit again (scontrol update JobId=$job ExcNodeList= allows them)"
    fi
  done
}

# The nodes on which srun could not start the ranks that it has just tried to, as on one whose crash Slurm has
# not seen yet: each with the reason, by srun's messages in the output of the job.
unstarted_nodes() {
  tail -c "+$((log_bytes + 1))" "$run/logs/executor.log" 2>/dev/null |
    sed -n 's/^srun: error: Task launch for .* failed on node \([^ :]*\): \(.*\)/\1 srun starts no rank on it: \2/p' |
    sort -u
}

# Leaves those nodes for others, as those that fail the check; but it is their crash, and does not count.
leave_nodes() {
  local host reason fit=()
  while read -r host reason; do name_unfit "$host" "$reason"; done <<<"$unfit"
  mapfile -t hosts < <(names_of "$SLURM_JOB_NODELIST")
  for host in "${hosts[@]}"; do grep -q "^$host " <<<"$unfit" || fit+=("$host"); done
  if [ "$spare_nodes" != 0 ] && [ "${#fit[@]}" -ge "$nodes" ]; then start_over "$(joined "${fit[@]}")"; fi
  give_up crashed
}

# The nodes in what Slurm tells of a job.
nodes_in() {
  sed -n '1s/.* NodeList=\([^ (]*\).*/\1/p' <<<"$1"
}

# Whether Slurm has taken crashed nodes from this job, which has spare ones, and goes on without them.
has_lost_nodes() {
  [ "$spare_nodes" != 0 ] || return
  local left host
  left=$(names_of "$(nodes_in "$1")")
  for host in $(names_of "$SLURM_JOB_NODELIST"); do grep -Fxq -e "$host" <<<"$left" || return 0; done
  return 1
}

# Starts over on the nodes that are left, or has Slurm find others where they are too few.
start_over() {
  local left=$1
  mapfile -t hosts < <(names_of "$left")
  say "nodes have crashed: $left are left of $SLURM_JOB_NODELIST"
  if [ "${#hosts[@]}" -lt "$nodes" ]; then
    start_again crashed
    exit "$unfinished"
  fi
  export SLURM_JOB_NODELIST=$left SLURM_JOB_NUM_NODES=${#hosts[@]} TRIREME_START_AGAIN=$((again + 1))
  unset GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME # those of ranks that are alone on a node
  if [ -n "${notifier:-}" ]; then kill "$notifier"; fi # the next start has its own
  trap - EXIT
  exec /bin/bash "$0"
}

# Whether all ranks are on this node.
is_alone=no
if [ "$nodes" = 1 ] && [ "$components" = 1 ]; then is_alone=yes; fi

# The rendezvous address: that of the first node.
find_address() {
  MASTER_ADDR=127.0.0.1
  if [ "$is_alone" = yes ]; then return; fi
  local hosts
  hosts=$(names_of "$nodelist") || fail "cannot resolve the rendezvous host from the node list '$nodelist'"
  [ "$(wc -l <<<"$hosts")" -eq "$nodes" ] || fail "the node list '$nodelist' does not name $nodes nodes"
  MASTER_ADDR=${hosts%%$'\n'*}$host_suffix
  case $MASTER_ADDR in
    localhost | localhost.* | 127.*) fail "other nodes cannot reach the rendezvous host $MASTER_ADDR" ;;
  esac
}

# A port is free where a server can be bound to it: one that is bound, and does not listen yet, refuses
# connections like a free one. Where no Python is outside of the container, the connection has to do.
bind='import errno, socket, sys
try:
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    socket.create_server(("", int(sys.argv[1])), family=family, dualstack_ipv6=dual)
except OSError as error:
    sys.exit(98 if error.errno == errno.EADDRINUSE else 1)'
is_free() {
  "$python" -ISc "$bind" "$1" 2>/dev/null
  case $? in
    0) ;;
    98) return 1 ;;
    *) ! (: <"/dev/tcp/127.0.0.1/$1") 2>/dev/null ;;
  esac
}

# The rendezvous port, different for each start of each job, as others may share the node. All are below
# 32768, where the ephemeral ports begin.
find_port() {
  local attempt
  for ((attempt = 0; attempt < 16; attempt++)); do
    MASTER_PORT=$((20000 + (SLURM_JOB_ID + 1009 * restart + 3001 * attempt) % 12000))
    if is_free "$MASTER_PORT"; then return; fi
  done
  fail "no free port for the rendezvous on $(hostname)"
}

choose_nodes
rendezvous=$this_start

# The ranks of one node meet in a file of the run directory, which only its owner can open, and speak over
# the loopback interface: nothing listens to other hosts. Some parallel file systems cannot lock a file.
rm -f "$run/rendezvous"
(umask 077 && : >"$run/rendezvous")
if [ "$is_alone" = yes ]; then export GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo; fi
if [ "$is_alone" = yes ] && flock -w 10 "$run/rendezvous" true 2>/dev/null; then
  export TRIREME_RENDEZVOUS_FILE=$run/rendezvous
  meet=(--rdzv-backend=trireme-one-host)
  say "job $SLURM_JOB_ID, restart $restart, by $starter: rendezvous $rendezvous in $run/rendezvous"
else
  find_address
  find_port
  # In the store of that port keys begin with a text that others do not know.
  TRIREME_RENDEZVOUS_KEY=$(od -An -N16 -tx8 /dev/urandom | tr -d ' \n')
  export MASTER_ADDR MASTER_PORT TRIREME_RENDEZVOUS_KEY
  meet=(--rdzv-backend=static --rdzv-id="$rendezvous" --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT")
  say "job $SLURM_JOB_ID, restart $restart, by $starter: rendezvous $rendezvous at $MASTER_ADDR:$MASTER_PORT"
fi

# A start after the first resumes from a checkpoint; a folder with a suffix is an incomplete one.
checkpoints=("$run"/checkpoints/step-????????)
if [ "$num_starts" != 1 ] && [ -e "${checkpoints[0]}" ]; then resume=(--resume); fi

# One task per rank. The $SLURM_ variables of a rank are set only inside the step. A rank that is still
# starting has nothing to save, and ignores the signal to do so.
task='
trap "" USR1
mkdir -p "${TMPDIR:-/tmp}" || exit
export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
exec "$@"'
command=(bash -c "$task" rank
  "$python" "$start" launcher.runtime.process.main "$run/plan.json" --sha256 "$plan_sha256" "${resume[@]}")
start_ranks srun --export=ALL --kill-on-bad-exit=1 --wait=0 --distribution=block \
  --nodes="$nodes" --ntasks=$((nodes * ranks_per_node)) --ntasks-per-node="$ranks_per_node" "${place[@]}" "${step[@]}" \
  "${command[@]}"
conclude
