import os
import sys

import pytest
import torch

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "python"))


def pytest_collection_modifyitems(items):
    for item in items:
        if os.path.dirname(__file__) not in str(item.fspath):
            continue
        item.add_marker(pytest.mark.cuda)
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU, and torch finds none"))
