
# The rendezvous address: that of the first node.
[ "${SLURM_JOB_NUM_NODES:-}" = "$nodes" ] ||
  fail "the plan needs $nodes nodes, and Slurm gave ${SLURM_JOB_NUM_NODES:-none}"
if [ "$nodes" = 1 ] && [ "$components" = 1 ]; then
  MASTER_ADDR=127.0.0.1
else
  hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST" 2>/dev/null) ||
    hosts=$("$python" -m launcher_plugins.executors.slurm.nodelist "$SLURM_JOB_NODELIST") ||
    fail "cannot resolve the rendezvous host from the node list '$SLURM_JOB_NODELIST'"
  [ "$(wc -l <<<"$hosts")" -eq "$nodes" ] ||
    fail "the node list '$SLURM_JOB_NODELIST' does not name $nodes nodes"
  MASTER_ADDR=${hosts%%$'\n'*}$host_suffix
  case $MASTER_ADDR in
    localhost | localhost.* | 127.*) fail "other nodes cannot reach the rendezvous host $MASTER_ADDR" ;;
  esac
fi

# A port is free where a server can be bound to it: one that is bound, and does not listen yet, refuses
# connections like a free one. Where no Python is outside of the container, the connection has to do.
bind='import errno, socket, sys
try:
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    socket.create_server(("", int(sys.argv[1])), family=family, dualstack_ipv6=dual)
except OSError as error:
    sys.exit(98 if error.errno == errno.EADDRINUSE else 1)'
is_free() {
  "$python" -ISc "$bind" "$1" 2>/dev/null
  case $? in
    0) ;;
    98) return 1 ;;
    *) ! (: <"/dev/tcp/127.0.0.1/$1") 2>/dev/null ;;
  esac
}

# The rendezvous port, different for each start of each job, as others may share the node. All are below
# 32768, where the ephemeral ports begin.
for ((attempt = 0; attempt < 16; attempt++)); do
  MASTER_PORT=$((20000 + (SLURM_JOB_ID + 1009 * restart + 3001 * attempt) % 12000))
  is_free "$MASTER_PORT" && break
done
[ "$attempt" -lt 16 ] || fail "no free port for the rendezvous on $(hostname)"
export MASTER_ADDR MASTER_PORT
rendezvous=$SLURM_JOB_ID.$restart
echo "trireme: job $SLURM_JOB_ID, restart $restart, by $starter: rendezvous $rendezvous at $MASTER_ADDR:$MASTER_PORT"

# A start after the first resumes from a checkpoint; a folder with a suffix is an incomplete one.
checkpoints=("$run"/checkpoints/step-????????)
if [ "$num_starts" != 1 ] && [ -e "${checkpoints[0]}" ]; then resume=(--resume); fi
