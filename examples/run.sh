#!/usr/bin/env bash
# Trains the small Llama of train_llama.py on 4 processes of this machine; installs and builds
# first whatever is missing. Arguments go to train_llama.py:
#
#   bash examples/run.sh
#   bash examples/run.sh --compare --plot curves.png
#
# NPROC: the number of processes (default 4).
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
exec "$venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node "${NPROC:-4}" \
  "$root/examples/train_llama.py" "$@"
