
fail() {
  echo "trireme: $*" >&2
  exit 1
}

# A requeued job begins anew in the same run directory. The failures of the start before it belong
# to that one, and are moved aside.
restart=${SLURM_RESTART_COUNT:-0}
[ "$restart" = 0 ] || mv "$run/exit" "$run/exit.$SLURM_JOB_ID.$((restart - 1))"
mkdir -p "$run/exit"

# How the job ended, for a cluster that forgets its jobs.
end_record() {
  printf '{"job": "%s", "exit_code": %s}\n' "$SLURM_JOB_ID" "$1" >"$run/exit/job.json"
}
trap 'end_record $?' EXIT
