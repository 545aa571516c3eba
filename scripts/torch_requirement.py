"""Metadata provider: the wheel requires the torch minor version that it is built with.

The extension links against libtorch, whose C++ interface changes with every minor version, so a
wheel built with torch 2.15.x says `torch>=2.15,<2.16`. scikit-build-core calls this at build time.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def torch_version() -> str:
    """Return the version of the torch that the build sees, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError(
            "dmuon: torch is not installed in the Python that builds dmuon. Install it first "
            "(pip install torch), then: pip install --no-build-isolation ."
        )
    text = Path(spec.submodule_search_locations[0], "version.py").read_text(encoding="utf-8")
    match = re.search(r"^__version__ *= *['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    if match is None:
        raise RuntimeError(f"dmuon: no __version__ in {spec.submodule_search_locations[0]}")
    return match.group(1)


def requirement(version: str) -> str:
    """Turn "2.15.0+cpu" into "torch>=2.15,<2.16"."""
    major, minor = (int(part) for part in version.split(".")[:2])
    return f"torch>={major}.{minor},<{major}.{minor + 1}"


def dynamic_metadata(
    settings: Mapping[str, Any], project: Mapping[str, Any]
) -> dict[str, list[str]]:
    """Answer scikit-build-core's request for project.dependencies."""
    if settings:
        raise ValueError(f"dmuon: torch_requirement takes no settings, got {dict(settings)!r}")
    return {"dependencies": [requirement(torch_version())]}


def dynamic_wheel(settings: Mapping[str, Any]) -> dict[str, bool]:
    """Mark the field as one that a source archive cannot know."""
    return {"dependencies": True}
