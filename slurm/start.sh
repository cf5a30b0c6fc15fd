
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
