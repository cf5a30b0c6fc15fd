#!/bin/bash
# quickstart: 4 ranks on 2 nodes, by srun.
#SBATCH --job-name=quickstart
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=8
#SBATCH --mem=0
#SBATCH --time=1-12:30:00
#SBATCH --account=physics
#SBATCH --partition=gpu,long
#SBATCH --qos=high
#SBATCH --constraint="a100&nvlink"
#SBATCH --nodelist="node[01-03]"
#SBATCH --exclude="node[07,09]"
#SBATCH --output="/runs/a b/logs/executor.log"
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --export=HF_HOME,HOME,LANG,LOGNAME,PATH,USER,WANDB_API_KEY
#SBATCH --comment="50% of \"it\" # $HOME"
#SBATCH --exclusive

run='/runs/a b'
plan_sha256=5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a
python=/venv/bin/python
starter=srun
nodes=2
ranks_per_node=2
host_suffix=i
resume=()
step=(--cpus-per-task=8 --container-image=/images/torch.sqsh '--container-mounts=/runs/a b:/runs/a b,/data:/data:ro' --container-env=GLOO_SOCKET_IFNAME,HF_HOME,LANG,LD_LIBRARY_PATH,LOGNAME,MASTER_ADDR,MASTER_PORT,NCCL_DEBUG,NCCL_SOCKET_IFNAME,OMP_NUM_THREADS,PYTHONDONTWRITEBYTECODE,PYTHONPATH,PYTHONSAFEPATH,PYTHONUNBUFFERED,USER,WANDB_API_KEY)

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

type module >/dev/null 2>&1 || . /etc/profile
module load cuda/12.4 || fail 'cannot load the module cuda/12.4'
ulimit -l unlimited
export PYTHONPATH='/runs/a b/lib'${PYTHONPATH:+:$PYTHONPATH}
export GLOO_SOCKET_IFNAME=ib0
export NCCL_SOCKET_IFNAME=ib0
export OMP_NUM_THREADS=1
export PYTHONDONTWRITEBYTECODE=1
export PYTHONSAFEPATH=1
export PYTHONUNBUFFERED=1
export NCCL_DEBUG='IN$FO'
export LD_LIBRARY_PATH="/opt/efa/lib:${LD_LIBRARY_PATH-}"

# One address for all ranks: the first node's.
[ "${SLURM_JOB_NUM_NODES:-}" = "$nodes" ] ||
  fail "the plan needs $nodes nodes, and Slurm gave ${SLURM_JOB_NUM_NODES:-none}"
if [ "$nodes" = 1 ]; then
  MASTER_ADDR=127.0.0.1
else
  hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST" 2>/dev/null) ||
    hosts=$("$python" -m launcher.topology.nodelist "$SLURM_JOB_NODELIST") ||
    fail "cannot resolve the rendezvous host from the node list '$SLURM_JOB_NODELIST'"
  [ "$(wc -l <<<"$hosts")" -eq "$nodes" ] ||
    fail "the node list '$SLURM_JOB_NODELIST' does not name $nodes nodes"
  MASTER_ADDR=${hosts%%$'\n'*}$host_suffix
  case $MASTER_ADDR in
    localhost | localhost.* | 127.*) fail "other nodes cannot reach the rendezvous host $MASTER_ADDR" ;;
  esac
fi

# One port for all ranks, of this start of this job: another job or start that shares the node has
# another one. All are below 32768, where those begin that any connection may take.
for ((attempt = 0; attempt < 16; attempt++)); do
  MASTER_PORT=$((20000 + (SLURM_JOB_ID + 1009 * restart + 3001 * attempt) % 12000))
  # Where nobody answers, the port is free.
  (: <"/dev/tcp/127.0.0.1/$MASTER_PORT") 2>/dev/null || break
done
[ "$attempt" -lt 16 ] || fail "no free port for the rendezvous on $(hostname)"
export MASTER_ADDR MASTER_PORT
rendezvous=$SLURM_JOB_ID.$restart
echo "trireme: job $SLURM_JOB_ID, restart $restart, by $starter: rendezvous $rendezvous at $MASTER_ADDR:$MASTER_PORT"

checkpoints=("$run"/checkpoints/step-*)
if [ "$restart" != 0 ] && [ -e "${checkpoints[0]}" ]; then resume=(--resume); fi

# One task per rank. The $SLURM_ variables of a rank have their values only inside of the step.
srun --export=ALL --kill-on-bad-exit=1 --distribution=block \
  --nodes="$nodes" --ntasks=$((nodes * ranks_per_node)) --ntasks-per-node="$ranks_per_node" "${step[@]}" \
  bash -c 'export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS; exec "$@"' rank \
  "$python" -m launcher.runtime.main "$run/plan.json" --sha256 "$plan_sha256" "${resume[@]}"
rc=$?
exit $rc
