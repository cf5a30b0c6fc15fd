
# When a rank fails, srun ends those of all components once: ranks that were still starting survive, and
# are ended here.
end_components() {
  local component job steps=()
  until tail -c +"$1" "$run/logs/executor.log" 2>/dev/null | grep -q '^srun: error: .*: tasks\? '; do sleep 1; done
  sleep 3
  for ((component = 0; component < components; component++)); do
    job=SLURM_JOB_ID_HET_GROUP_$component
    steps+=("${!job}.0")
  done
  scancel --quiet "${steps[@]}"
}

# One step over all components of the job, so that its ranks are numbered consecutively in their order.
words=() rank=0
for ((component = 0; component < components; component++)); do
  declare -n options=step$component hosts_of_component=SLURM_JOB_NODELIST_HET_GROUP_$component
  words+=(: --het-group="$component" --export=ALL --kill-on-bad-exit=1 --wait=0 --distribution=block
    "${options[@]}" "${command[@]}")
  say "ranks from $rank on $hosts_of_component"
  rank=$((rank + ranks_of_component[component]))
done
told=$(cat "$run/logs/executor.log" 2>/dev/null | wc -c) # before srun can tell more
end_components "$told" >/dev/null 2>&1 &
guard=$!
start_ranks srun "${words[@]:1}"
kill "$guard" 2>/dev/null
conclude
