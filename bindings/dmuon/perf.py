"""``python -m dmuon.perf``: the benchmark of the owner collectives of CPU tensors.

Runs the program ``dmuon_perf`` that is installed with the package, with the same options; ``python
-m dmuon.perf --help`` explains them. It forks its ranks itself, or takes a launcher's::

    torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:PORT \\
        --module dmuon.perf --begin 1M --end 64M
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn


def program() -> Path:
    """Return the path of ``dmuon_perf``.

    Raises:
        FileNotFoundError: this dmuon was built without it.
    """
    path = Path(__file__).parent / "bin" / "dmuon_perf"
    if not os.access(path, os.X_OK):
        raise FileNotFoundError(
            f"dmuon.perf: there is no program {path}: this dmuon was built without the benchmark; "
            "build it again with -DDMUON_BUILD_TOOLS=ON (the default)"
        )
    return path


def main() -> NoReturn:
    """Become the program."""
    try:
        path = program()
    except FileNotFoundError as error:
        sys.exit(str(error))
    sys.stdout.flush()
    os.execv(path, [str(path), *sys.argv[1:]])


if __name__ == "__main__":
    main()
