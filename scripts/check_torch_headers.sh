#!/usr/bin/env bash
# Checks that dmuon compiles against another torch version's headers:
#
#   bash scripts/check_torch_headers.sh 2.11.0
#
# Fetches that version's wheel with pip, unpacks its headers into build/torch-headers/VERSION (the
# wheel itself is thrown away) and runs the compiler with -fsyntax-only over every source file of
# backend/, optim/ and bindings/, with UCX and NCCL where .venv has their headers. The files of
# backend/src go through it together, as in a build with a sanitizer. Run it when those files change;
# it is too slow and too large a download for every test run.
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

# Where the headers of a package are, as an option; nothing if it is not installed.
headers_of() {
  "$python" - "$@" <<'PYTHON'
import importlib.util, pathlib, sys

name, *folders = sys.argv[1:]
spec = importlib.util.find_spec(name)
places = [pathlib.Path(place) for place in (spec.submodule_search_locations if spec else [])]
found = [place / folder for place in places for folder in folders if (place / folder).is_dir()]
print(" ".join(f"-isystem {folder}" for folder in found))
PYTHON
}
options="-I$root/backend/include -I$root/optim/include -I$root/backend/src -I$root/optim/src
  -isystem $cache/torch/include -isystem $cache/torch/include/torch/csrc/api/include
  -isystem $("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
  -DTORCH_EXTENSION_NAME=_C"
ucx=$(headers_of libucx include)
[[ -z $ucx ]] || options+=" -DDMUON_HAVE_UCX -DDMUON_UCX_BUILD_LIBRARY=\"\" $ucx"
nccl=$(headers_of nvidia nccl/include cu13/include cuda_runtime/include)
[[ $nccl != */nccl/* ]] || options+=" -DDMUON_HAVE_NCCL $nccl"
echo "UCX: ${ucx:-no headers found}, NCCL: ${nccl:-no headers found}"

# Prints what failed; the exit code counts.
check() {
  local file=$1 log
  # shellcheck disable=SC2086
  if log=$(g++ -std=c++20 -fsyntax-only -Wall -Wextra -Wno-unused-parameter \
    $options "$file" 2>&1); then
    printf 'ok      %s\n' "${file#"$root"/}"
  else
    printf 'FAILED  %s\n%s\n' "${file#"$root"/}" "$log"
    return 1
  fi
}
export -f check
export root options

together() { printf '#include "%s"\n' "${@:2}" >"$1"; }
together "$cache/backend_host.cpp" $(find "$root/backend/src" -name '*.cpp' ! -name 'nccl_*' | sort)
together "$cache/backend_nccl.cpp" "$root"/backend/src/nccl_*.cpp
mapfile -t files < <(ls "$cache"/backend_*.cpp &&
  find "$root/backend/tools" "$root/optim/src" "$root/bindings/src" -name '*.cpp' | sort)
echo "torch $version: checking ${#files[@]} files"
if printf '%s\0' "${files[@]}" | xargs -0 -P "${JOBS:-2}" -I{} bash -c 'check "$1"' _ {}; then
  echo "torch $version: all ${#files[@]} files compile"
else
  echo "torch $version: some files do not compile" >&2
  exit 1
fi
