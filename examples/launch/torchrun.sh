#!/bin/sh
# On one host. After a failure, torchrun starts all ranks again, and they resume from the checkpoint. On several, run this
# on each of them with: --nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:29400 instead of --standalone.
cd "$(dirname "$0")" || exit
exec "${PYTHON:-python}" -m torch.distributed.run --standalone --nproc-per-node "${RANKS:-2}" --max-restarts 3 \
  train.py "$@"
