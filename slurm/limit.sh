
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
