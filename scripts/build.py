"""Builds dmuon and installs it into the Python that runs this, if any source has changed.

    python scripts/build.py [--tests ON|OFF]

pip drives the build (no isolation, no dependencies) in the persistent folder build/, so a rebuild
compiles only what changed, and ctest finds its programs there. A fingerprint of all sources, of
torch's version and of the options is kept beside the installed package; if it fits, nothing runs.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
LOG = BUILD / "build.log"
SOURCES = ("backend", "optim", "bindings", "cmake", "scripts/torch_requirement.py",
           "CMakeLists.txt", "pyproject.toml", "tests/cpp/CMakeLists.txt")  # fmt: skip


def source_files() -> list[Path]:
    """List what a rebuild depends on."""
    files: list[Path] = []
    for name in SOURCES:
        path = ROOT / name
        files += [path] if path.is_file() else [f for f in path.rglob("*") if f.is_file()]
    return sorted(f for f in files if "__pycache__" not in f.parts)


def fingerprint(tests: str) -> str:
    """Hash the sources and everything else that decides what a build gives."""
    digest = hashlib.sha256()
    for text in (sys.executable, sys.version, version("torch"), str(ROOT), tests):
        digest.update(text.encode() + b"\0")
    for file in source_files():
        digest.update(str(file.relative_to(ROOT)).encode() + b"\0")
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def forget_moved_build_folder() -> None:
    """CMake refuses a folder that was configured at another place or with another Python."""
    cache = BUILD / "CMakeCache.txt"
    if not cache.exists():
        return
    text = cache.read_text(encoding="utf-8", errors="replace")
    home = re.search(r"^CMAKE_HOME_DIRECTORY:INTERNAL=(.*)$", text, re.MULTILINE)
    python = re.search(r"^(?:_?)Python3_EXECUTABLE:[A-Z]+=(.*)$", text, re.MULTILINE)
    moved = home is None or Path(home.group(1)) != ROOT
    other = python is not None and Path(python.group(1)).parent != Path(sys.executable).parent
    if moved or other or "SKBUILD" not in text:
        print("dmuon build: build/ belongs to another checkout or Python: starting anew")
        shutil.rmtree(BUILD)


def install(tests: str) -> int:
    """Run pip; show the compiler's progress, keep everything else in the log."""
    BUILD.mkdir(exist_ok=True)
    command = [
        sys.executable, "-m", "pip", "install", "--verbose", "--disable-pip-version-check",
        "--no-build-isolation", "--no-deps", "--force-reinstall",
        "--config-settings=build-dir=build",
        f"--config-settings=cmake.define.DMUON_BUILD_TESTS={tests}",
        str(ROOT),
    ]  # fmt: skip
    started = time.monotonic()
    with (
        LOG.open("w", encoding="utf-8") as log,
        subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line)
            step = re.match(r"\s*\[(\d+)/(\d+)\] (?:Building|Linking|Creating)", line)
            if step:
                seconds = time.monotonic() - started
                print(f"dmuon build: {step[1]} of {step[2]} steps, {seconds:.0f} s", flush=True)
    return process.returncode


def main() -> int:
    """Build if needed and return an exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tests", choices=("ON", "OFF"), default="OFF")
    tests = parser.parse_args().tests

    package = Path(sysconfig.get_path("platlib")) / "dmuon"
    stamp = package / ".fingerprint"
    wanted = fingerprint(tests)
    built = (BUILD / "CMakeCache.txt").exists()
    if built and stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return 0

    forget_moved_build_folder()
    print(f"dmuon build: compiling with torch {version('torch')} (the first time takes minutes)")
    code = install(tests)
    if code != 0:
        lines = LOG.read_text(encoding="utf-8", errors="replace").splitlines()
        errors = [i for i, line in enumerate(lines) if re.search(r"\berror\b|Error", line)]
        first = max(0, errors[0] - 3) if errors else max(0, len(lines) - 40)
        print("\n".join(lines[first : first + 40]), file=sys.stderr)
        print(f"dmuon build: failed; everything is in {LOG.relative_to(ROOT)}", file=sys.stderr)
        return 1
    stamp.write_text(wanted, encoding="utf-8")
    print("dmuon build: done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
