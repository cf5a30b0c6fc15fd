
# One task per node: torchrun, which starts the node's ranks. Its rendezvous is not dynamic, so the ranks of a
# node are given by SLURM_NODEID, which is set only inside the step. The signal to save also reaches
# torchrun, which it would kill.
task='
trap "" USR1
mkdir -p "${TMPDIR:-/tmp}" || exit
exec "$1" "$2" torch.distributed.run --node-rank="$SLURM_NODEID" "${@:3}"'
start_ranks srun --export=ALL --kill-on-bad-exit=1 --wait=0 --distribution=block \
  --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 "${place[@]}" "${step[@]}" \
  bash -c "$task" torchrun \
  "$python" "$start" --nnodes="$nodes" --nproc-per-node="$ranks_per_node" --max-restarts=0 \
  "${meet[@]}" --log-dir="$run/logs/torchrun" \
  "$start" launcher.runtime.process.main "$run/plan.json" --sha256 "$plan_sha256" "${resume[@]}"
conclude
