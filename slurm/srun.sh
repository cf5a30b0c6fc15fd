
# One task per rank. The $SLURM_ variables of a rank are set only inside the step. A rank that is still
# starting has nothing to save, and ignores the signal to do so.
task='
trap "" USR1
mkdir -p "${TMPDIR:-/tmp}" || exit
export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
exec "$@"'
command=(bash -c "$task" rank
  "$python" "$start" launcher.runtime.process.main "$run/plan.json" --sha256 "$plan_sha256" "${resume[@]}")
