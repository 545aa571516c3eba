import os
import sys

sys.path.insert(0, os.path.dirname(__file__))

# Ranks are forked: the parent must not start thread pools.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(1)
