
# Slurm tells this shell when the time limit is near (USR1) and when the job has to go (TERM). The ranks
# are told: they save after the step that they are in, leave a note, and end. A rank that is still
# starting passes over it, so it is said until they have ended.
unfinished=75 # the exit code of a job whose run can go on; both starters hide those of the ranks
note=$run/exit/stopped.json
ranks='' num_told=0
tell() {
  num_told=$((num_told + 1))
  if [ "$num_told" = 1 ] && [ -n "$ranks" ]; then tell_ranks 0 >/dev/null 2>&1 & fi
}
tell_ranks() {
  sleep "$1"
  while kill -USR1 "$ranks"; do sleep 2; done
}
if [ "$saves" = yes ]; then trap tell USR1 TERM; fi

# Starts the ranks and waits for their end, which a signal does not cut short. A rank that fails ends the
# others at once (--kill-on-bad-exit), one that is done before them ends none (--wait=0).
start_ranks() {
  local num_before=$num_told
  "$@" &
  ranks=$!
  if [ "$num_before" != 0 ]; then tell_ranks 5 >/dev/null 2>&1 & fi # srun has to be up, too
  until
    num_before=$num_told
    wait "$ranks"
    rc=$?
    [ "$num_before" = "$num_told" ]
  do :; done
}

# Ends this start, and sees to it that there is another one where the run can go on. A job that Slurm
# has requeued, as it does for a preemption or a lost node, or has cancelled, is left to it.
conclude() {
  [ "$rc" != 0 ] || [ -e "$note" ] || exit 0
  local job state
  job=$(scontrol --oneliner show job "$job_id")
  state=$(sed -n 's/.* JobState=\([A-Z_]*\).*/\1/p' <<<"$job")
  state=${state%%$'\n'*} # of several parts the first
  # The steps of a job that is to give way are told, its script is not: ranks end that cannot save yet.
  case $job in *" PreemptTime="[0-9]*) num_told=$((num_told + 1)) ;; esac
  if [ "${state:-RUNNING}" != RUNNING ]; then
    echo "trireme: leaves job $job_id to Slurm, where it is $state"
  elif [ -e "$note" ] || [ "$num_told" != 0 ]; then
    begin_again
  else
    echo "$SLURM_JOB_ID.$restart" >>"$run/logs/failures"
    if has_failed; then give_up; else begin_again; fi
    exit "$rc"
  fi
  exit "$unfinished"
}

has_failed() {
  [ -e "$run/logs/failures" ] && [ "$(wc -l <"$run/logs/failures")" -gt "$max_restarts" ]
}

# In a chain, the next job waits for this one to end with another code than 0.
begin_again() {
  [ "$continuation" = requeue ] || return
  if [ "$num_starts" -lt "$max_starts" ]; then
    echo "trireme: requeues job $job_id after start $num_starts"
    scontrol requeue "$job_id"
  else
    echo "trireme: not requeued after start $num_starts of at most $max_starts (executor.max_starts)"
  fi
}

# Cancels the jobs of the chain that would go on with what has failed.
give_up() {
  local job
  [ "$continuation" = chain ] || return
  while read -r job; do
    [ "$job" = "$SLURM_JOB_ID" ] || scancel --quiet "$job"
  done <"$run/logs/chain"
}

if [ "$continuation" = chain ] && has_failed; then # before this job of the chain could be cancelled
  give_up
  fail "the run has failed for good before (executor.max_restarts=$max_restarts)"
fi
