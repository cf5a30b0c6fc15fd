#!/bin/sh
exec env OMP_NUM_THREADS=1 PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 \
  /opt/trireme/.venv/bin/python \
  -m \
  torch.distributed.run \
  --nnodes=1 \
  --nproc-per-node=2 \
  --max-restarts=0 \
  --rdzv-backend=c10d \
  --rdzv-endpoint=localhost:0 \
  --local-addr=127.0.0.1 \
  --log-dir=/home/user/pp2/logs/torchrun \
  --module \
  launcher.runtime.main \
  /home/user/pp2/plan.json \
  --sha256 \
  f3fc54449d831bace6f802e64bdf3ff1bf2573199d37caf74f215ac425d5f0d7
