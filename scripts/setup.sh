#!/usr/bin/env bash
# Makes everything that dmuon's run scripts need, and does nothing, quickly, when it is all there:
# a virtual environment with torch, build tools and the asked extras, and dmuon built into it.
#
#   scripts/setup.sh [EXTRA...]     EXTRA: test, examples, tensorboard, ucx (see pyproject.toml)
#
# DMUON_VENV      folder of the virtual environment (default: .venv in the repository). A torch of a
#                 supported version that is already in it is kept.
# DMUON_PYTHON    the Python that makes it (default: python3)
# DMUON_BUILD     0: stop after the environment, don't build dmuon
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${DMUON_VENV:-$root/.venv}
python=${DMUON_PYTHON:-python3}
extras=("$@")

say() { printf 'dmuon setup: %s\n' "$*"; }
die() {
  printf 'dmuon setup: %s\n' "$*" >&2
  exit 1
}
wants() { [[ " ${extras[*]-} " == *" $1 "* ]]; }

has_venv_module() { "$python" -c 'import ensurepip, venv' 2>/dev/null; }
has_python_headers() {
  "$python" -c 'import pathlib, sys, sysconfig
sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists())' 2>/dev/null
}
has_compiler() {
  command -v g++ >/dev/null && printf '#include <concepts>\n' | g++ -std=c++20 -fsyntax-only -x c++ - 2>/dev/null
}
has_gmock() { printf '#include <gmock/gmock.h>\n' | g++ -std=c++20 -E -x c++ - >/dev/null 2>&1; }
has_gtest() { printf '#include <gtest/gtest.h>\n' | g++ -std=c++20 -E -x c++ - >/dev/null 2>&1; }

# Prints the Debian packages that are missing, a line each: "need NAME" or "nice NAME".
missing_packages() {
  if ! command -v "$python" >/dev/null; then
    printf 'need python3\nneed python3-venv\nneed python3-dev\n'
  else
    has_venv_module || echo need python3-venv
    has_python_headers || echo need python3-dev
  fi
  has_compiler || echo need g++
  if wants test && ! has_gtest; then echo need libgtest-dev; fi
  if wants test && ! has_gmock; then echo nice libgmock-dev; fi
  command -v ccache >/dev/null || echo nice ccache
}

install_system_packages() {
  local missing need nice
  missing=$(missing_packages)
  need=$(awk '$1 == "need" {printf "%s ", $2}' <<<"$missing")
  nice=$(awk '$1 == "nice" {printf "%s ", $2}' <<<"$missing")
  [[ -n $need$nice ]] || return 0
  if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
    say "installing Debian packages: $need$nice"
    # shellcheck disable=SC2086
    if ! apt_install $need $nice; then
      [[ -z $need ]] || apt_install $need || die "apt-get could not install: $need"
    fi
  elif [[ -n $need ]]; then
    die "missing on this machine: ${need}
  On Debian or Ubuntu: sudo apt-get install ${need}${nice}
  Elsewhere: Python 3.10 or newer with venv and headers, g++ 12 or newer, GoogleTest (tests only)."
  fi
  missing=$(missing_packages | awk '$1 == "need" {printf "%s ", $2}')
  [[ -z $missing ]] || die "still missing after the installation: $missing
  (g++ must know C++20: version 12 or newer; headers must belong to $(command -v "$python"))"
}

apt_install() {
  local log
  log=$(mktemp)
  if { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@"; } \
    >"$log" 2>&1 </dev/null; then
    rm -f "$log"
  else
    tail -n 20 "$log" >&2
    rm -f "$log"
    return 1
  fi
}

make_venv() {
  if "$venv/bin/python" -c 'import pip' 2>/dev/null; then return 0; fi
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    die "Python 3.10 or newer is needed; $python is $("$python" -V 2>&1). Set DMUON_PYTHON to another."
  if [[ -e $venv ]]; then say "the environment in $venv does not work: making it anew"; fi
  say "making a virtual environment in $venv"
  "$python" -m venv --clear "$venv"
}

install_system_packages
make_venv
"$venv/bin/python" "$root/scripts/requirements.py" "${extras[@]}"
if [[ ${DMUON_BUILD:-1} != 0 ]]; then
  tests=OFF
  if has_gtest; then tests=ON; fi
  "$venv/bin/python" "$root/scripts/build.py" --tests "$tests"
fi
