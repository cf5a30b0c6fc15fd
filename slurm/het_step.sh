
# One step over all parts of the job, so that its ranks have one range of numbers, in the parts' order.
words=() rank=0
for ((part = 0; part < parts; part++)); do
  declare -n options=step$part hosts_of_part=SLURM_JOB_NODELIST_HET_GROUP_$part
  words+=(: --het-group="$part" --export=ALL --kill-on-bad-exit=1 --distribution=block
    "${options[@]}" "${command[@]}")
  echo "trireme: ranks from $rank on $hosts_of_part"
  rank=$((rank + ranks_of_part[part]))
done
start_ranks srun "${words[@]:1}"
conclude
