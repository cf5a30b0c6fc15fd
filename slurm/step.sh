start_ranks srun --export=ALL --kill-on-bad-exit=1 --wait=0 --distribution=block \
  --nodes="$nodes" --ntasks=$((nodes * ranks_per_node)) --ntasks-per-node="$ranks_per_node" "${place[@]}" "${step[@]}" \
  "${command[@]}"
conclude
