#!/usr/bin/env bash
# Checks that backend/ and optim/ compile against another torch version's headers:
#
#   bash scripts/check_torch_headers.sh 2.11.0
#
# Fetches that version's wheel with pip, unpacks its headers into build/torch-headers/VERSION (the
# wheel itself is thrown away) and runs the compiler with -fsyntax-only over every source file. Run
# it when those files change; it is too slow and too large a download for every test run.
#
# PYTHON: the Python whose pip fetches (default: .venv's). JOBS: compilers at once (default 2).
set -euo pipefail
version=${1:?usage: bash scripts/check_torch_headers.sh VERSION, for example 2.11.0}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
cache=$root/build/torch-headers/$version

if [[ ! -e $cache/complete ]]; then
  mkdir -p "$cache"
  download=$(mktemp -d)
  trap 'rm -rf "$download"' EXIT
  echo "fetching torch $version"
  "$python" -m pip download --quiet --no-deps --only-binary :all: --no-cache-dir \
    --dest "$download" "torch==$version"
  "$python" - "$download" "$cache" <<'PYTHON'
import pathlib, sys, zipfile

download, cache = map(pathlib.Path, sys.argv[1:])
(wheel,) = download.glob("torch-*.whl")
with zipfile.ZipFile(wheel) as archive:
    names = [n for n in archive.namelist() if n.startswith("torch/include/") or n == "torch/version.py"]
    archive.extractall(cache, names)
print(f"{len(names)} headers")
PYTHON
  touch "$cache/complete"
fi

# Prints what failed; the exit code counts.
check() {
  local file=$1 log
  if log=$(g++ -std=c++20 -fsyntax-only -Wall -Wextra -Wno-unused-parameter \
    -I"$root/backend/include" -I"$root/optim/include" -I"$root/backend/src" -I"$root/optim/src" \
    -isystem "$cache/torch/include" -isystem "$cache/torch/include/torch/csrc/api/include" \
    "$file" 2>&1); then
    printf 'ok      %s\n' "${file#"$root"/}"
  else
    printf 'FAILED  %s\n%s\n' "${file#"$root"/}" "$log"
    return 1
  fi
}
export -f check
export root cache

mapfile -t files < <(find "$root/backend/src" "$root/optim/src" -name '*.cpp' | sort)
((${#files[@]})) || {
  echo "no sources found" >&2
  exit 1
}
echo "torch $version: checking ${#files[@]} files"
if printf '%s\0' "${files[@]}" | xargs -0 -P "${JOBS:-2}" -I{} bash -c 'check "$1"' _ {}; then
  echo "torch $version: all ${#files[@]} files compile"
else
  echo "torch $version: some files do not compile" >&2
  exit 1
fi
