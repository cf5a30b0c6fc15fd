#!/bin/sh
exec env OMP_NUM_THREADS=1 PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 \
  /opt/trireme/.venv/bin/python \
  -m \
  torch.distributed.run \
  --nnodes=1 \
  --nproc-per-node=1 \
  --max-restarts=0 \
  --rdzv-backend=c10d \
  --rdzv-endpoint=localhost:0 \
  --local-addr=127.0.0.1 \
  --log-dir=/home/user/one/logs/torchrun \
  --module \
  launcher.runtime.main \
  /home/user/one/plan.json \
  --sha256 \
  652aa27c2a945fb4e5542915d4773ea9585285ab80a87fc526ea82af1b8b72c7
