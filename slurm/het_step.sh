
# srun ends the ranks of all parts when one fails, once: those that were only starting live on, and are
# ended here.
end_parts() {
  local part job steps=()
  until tail -c +"$1" "$run/logs/executor.log" 2>/dev/null | grep -q '^srun: error: .*: tasks\? '; do sleep 1; done
  sleep 3
  for ((part = 0; part < parts; part++)); do
    job=SLURM_JOB_ID_HET_GROUP_$part
    steps+=("${!job}.0")
  done
  scancel --quiet "${steps[@]}"
}

# One step over all parts of the job, so that its ranks have one range of numbers, in the parts' order.
words=() rank=0
for ((part = 0; part < parts; part++)); do
  declare -n options=step$part hosts_of_part=SLURM_JOB_NODELIST_HET_GROUP_$part
  words+=(: --het-group="$part" --export=ALL --kill-on-bad-exit=1 --wait=0 --distribution=block
    "${options[@]}" "${command[@]}")
  echo "trireme: ranks from $rank on $hosts_of_part"
  rank=$((rank + ranks_of_part[part]))
done
end_parts "$(cat "$run/logs/executor.log" 2>/dev/null | wc -c)" >/dev/null 2>&1 &
guard=$!
start_ranks srun "${words[@]:1}"
kill "$guard" 2>/dev/null
conclude
