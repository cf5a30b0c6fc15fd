
fail() {
  echo "trireme: $*" >&2
  exit 1
}

# Each start of the ranks, by this job or another one of the run, is a line in logs/starts. The exit/ folder
# of the previous start is moved aside.
restart=${SLURM_RESTART_COUNT:-0}
# The id of this job in Slurm's commands: the id of an array is also that of one of its tasks.
job_id=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job_id=${job_id:-$SLURM_JOB_ID}
mkdir -p "$run/logs"
before=$(tail -n 1 "$run/logs/starts" 2>/dev/null)
if [ -e "$run/exit/finished" ]; then
  echo "trireme: the run is finished, so job $job_id has nothing to start"
  exit 0
fi
[ -z "$before" ] || mv "$run/exit" "$run/exit.$before"
mkdir -p "$run/exit"
echo "$SLURM_JOB_ID.$restart" >>"$run/logs/starts"
printf '{"time": %s, "job": "%s"}\n' "$(date +%s)" "$job_id" >"$run/exit/start.json"
num_starts=$(wc -l <"$run/logs/starts")

# How the job ended, for a cluster that does not keep records of its jobs.
end_record() {
  printf '{"job": "%s", "exit_code": %s}\n' "$job_id" "$1" >"$run/exit/job.json"
}
trap 'end_record $?' EXIT
# A signal that ends this shell would put 0 into that record.
end_by() {
  end_record $((128 + $1))
  trap - EXIT "$1"
  kill -"$1" $$
}
for signal in 1 10 12 15; do trap "end_by $signal" "$signal"; done # HUP, USR1, USR2, TERM
[ "$num_starts" -le "$max_starts" ] || fail "the run was started $max_starts times (executor.max_starts)"
