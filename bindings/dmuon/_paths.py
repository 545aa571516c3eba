"""Where the C++ side of an installed dmuon lies."""

from __future__ import annotations

from pathlib import Path

#: For ``cmake -DCMAKE_PREFIX_PATH=$(python -c "import dmuon; print(dmuon.cmake_prefix_path)")`` and
#: ``find_package(dmuon)``.
cmake_prefix_path = str(Path(__file__).resolve().parent)
