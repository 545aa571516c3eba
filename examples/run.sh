#!/usr/bin/env bash
# Trains the small Llama of train_llama.py on 4 processes of this machine; installs and builds
# first whatever is missing. Arguments go to train_llama.py:
#
#   bash examples/run.sh
#   bash examples/run.sh --compare --plot curves.png
#
# NPROC: the number of processes (default 4). MAX_RESTARTS: how often they are started again when one
# of them dies (default 0); with --save-every and --resume they go on from the newest checkpoint.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${DMUON_VENV:-$root/.venv}

extras=(examples ucx)
for argument in "$@"; do
  if [[ $argument == --tensorboard* ]]; then extras+=(tensorboard); fi
done
bash "$root/scripts/setup.sh" "${extras[@]}"

# One thread per rank: four ranks share this machine's cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Processes that torchrun starts again must not find the addresses of those that have ended.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}
exec "$venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node "${NPROC:-4}" \
  --max-restarts "${MAX_RESTARTS:-0}" \
  "$root/examples/train_llama.py" "$@"
