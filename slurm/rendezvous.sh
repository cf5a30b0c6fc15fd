
# Whether all ranks are on this node.
is_alone=no
if [ "$nodes" = 1 ] && [ "$components" = 1 ]; then is_alone=yes; fi

# The rendezvous address: that of the first node.
find_address() {
  MASTER_ADDR=127.0.0.1
  if [ "$is_alone" = yes ]; then return; fi
  local hosts
  hosts=$(names_of "$nodelist") || fail "cannot resolve the rendezvous host from the node list '$nodelist'"
  [ "$(wc -l <<<"$hosts")" -eq "$nodes" ] || fail "the node list '$nodelist' does not name $nodes nodes"
  MASTER_ADDR=${hosts%%$'\n'*}$host_suffix
  case $MASTER_ADDR in
    localhost | localhost.* | 127.*) fail "other nodes cannot reach the rendezvous host $MASTER_ADDR" ;;
  esac
}

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
find_port() {
  local attempt
  for ((attempt = 0; attempt < 16; attempt++)); do
    MASTER_PORT=$((20000 + (SLURM_JOB_ID + 1009 * restart + 3001 * attempt) % 12000))
    if is_free "$MASTER_PORT"; then return; fi
  done
  fail "no free port for the rendezvous on $(hostname)"
}

choose_nodes
rendezvous=$this_start

# The ranks of one node meet in a file of the run directory, which only its owner can open, and speak over
# the loopback interface: nothing listens to other hosts. Some parallel file systems cannot lock a file.
rm -f "$run/rendezvous"
(umask 077 && : >"$run/rendezvous")
if [ "$is_alone" = yes ]; then export GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo; fi
if [ "$is_alone" = yes ] && flock -w 10 "$run/rendezvous" true 2>/dev/null; then
  export TRIREME_RENDEZVOUS_FILE=$run/rendezvous
  meet=(--rdzv-backend=trireme-one-host)
  say "job $SLURM_JOB_ID, restart $restart, by $starter: rendezvous $rendezvous in $run/rendezvous"
else
  find_address
  find_port
  # In the store of that port keys begin with a text that others do not know.
  TRIREME_RENDEZVOUS_KEY=$(od -An -N16 -tx8 /dev/urandom | tr -d ' \n')
  export MASTER_ADDR MASTER_PORT TRIREME_RENDEZVOUS_KEY
  meet=(--rdzv-backend=static --rdzv-id="$rendezvous" --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT")
  say "job $SLURM_JOB_ID, restart $restart, by $starter: rendezvous $rendezvous at $MASTER_ADDR:$MASTER_PORT"
fi

# A start after the first resumes from a checkpoint; a folder with a suffix is an incomplete one.
checkpoints=("$run"/checkpoints/step-????????)
if [ "$num_starts" != 1 ] && [ -e "${checkpoints[0]}" ]; then resume=(--resume); fi
