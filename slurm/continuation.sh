
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
