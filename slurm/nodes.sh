
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
