#!/usr/bin/env bash
# Runs dmuon's tests; installs and builds first whatever is missing.
#
#   bash tests/run.sh                           everything
#   bash tests/run.sh cpp                       C++ tests (ctest)
#   bash tests/run.sh python [PYTEST ARGS...]   Python tests (pytest)
#   bash tests/run.sh lint                      clang-format, ruff, mypy
#   bash tests/run.sh sanitizers                the backend under ThreadSanitizer and
#                                               AddressSanitizer, in a short form
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root" || exit 1
bin=${DMUON_VENV:-$root/.venv}/bin
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

failed=()
summary=()
# stage NAME COMMAND...: runs it under a header, and notes its time and result.
stage() {
  local name=$1 start=$SECONDS result
  shift
  printf '\n==== %s\n' "$name"
  if "$@"; then result=ok; else result=FAILED; fi
  [[ $result == ok ]] || failed+=("$name")
  summary+=("$(printf '%-24s %-7s %4d s' "$name" "$result" $((SECONDS - start)))")
  [[ $result == ok ]]
}

run_cpp() {
  stage "C++ tests: build" build_cpp || return 0
  stage "C++ tests" "$bin/ctest" --test-dir build --output-on-failure --no-tests=error \
    -LE cuda --parallel "$(nproc)"
}
build_cpp() {
  "$bin/cmake" --build build --target dmuon_tests
}

run_python() {
  stage "Python tests" "$bin/python" -m pytest "$@"
}

# Enough of the backend's programs to run all of its threads through all of their states, in builds
# of their own (cmake/DmuonSanitizers.cmake).
sanitized='backend_(agreement|owner_collectives|many_groups|failure|fork)_test'
run_sanitizers() {
  local kind again
  for kind in thread address; do
    # LeakSanitizer's own tracer dies now and then ("Tracer caught signal 11"). A leak stays a leak.
    # And the children that the fork test forks of processes with threads hang now and then there.
    again=()
    [[ $kind != address ]] || again=(--repeat until-pass:2 -E fork)
    stage "$kind sanitizer: build" build_sanitizer "$kind" || continue
    DMUON_TEST_OPERATIONS=400 stage "$kind sanitizer" "$bin/ctest" --test-dir "build/$kind" \
      --output-on-failure --no-tests=error --parallel "$(nproc)" "${again[@]}" \
      -R "^${sanitized}(\.ucx)?\$"
  done
}
build_sanitizer() {
  local programs
  programs=$(ls tests/cpp | sed -n 's/\.cpp$//p' | grep -xE "$sanitized")
  # shellcheck disable=SC2086
  "$bin/cmake" -G Ninja -S . -B "build/$1" -DDMUON_SANITIZE="$1" -DDMUON_BUILD_OPTIM=OFF \
    -DDMUON_BUILD_TESTS=ON -DDMUON_BUILD_TOOLS=OFF -DDMUON_NCCL=OFF -DPython3_EXECUTABLE="$bin/python" \
    -DCMAKE_MAKE_PROGRAM="$(PATH=$bin:$PATH command -v ninja)" &&
    "$bin/cmake" --build "build/$1" --target $programs
}

run_lint() {
  stage "clang-format" clang_format
  stage "ruff check" "$bin/ruff" check .
  stage "ruff format" "$bin/ruff" format --check .
  stage "mypy" "$bin/mypy"
}
clang_format() {
  git ls-files -z -- '*.h' '*.cpp' | xargs -0 "$bin/clang-format" --dry-run -Werror
}

what=${1:-all}
[[ $# == 0 ]] || shift
case $what in
  all | cpp | python | lint | sanitizers) ;;
  *)
    echo "usage: bash tests/run.sh [all|cpp|python|lint|sanitizers] [PYTEST ARGS...]" >&2
    exit 2
    ;;
esac

set_up() {
  DMUON_BUILD=$([[ $what == lint ]] && echo 0 || echo 1) bash scripts/setup.sh test examples ucx
}
stage "setup and build" set_up || {
  printf '\nsetup or build failed: no test was run\n' >&2
  exit 1
}

case $what in
  all)
    run_lint
    run_cpp
    run_sanitizers
    run_python "$@"
    ;;
  cpp) run_cpp ;;
  python) run_python "$@" ;;
  lint) run_lint ;;
  sanitizers) run_sanitizers ;;
esac

printf '\n==== summary\n'
printf '%s\n' "${summary[@]}"
if ((${#failed[@]})); then
  printf 'FAILED: %s\n' "${failed[*]}"
  exit 1
fi
printf 'all stages passed in %d s\n' "$SECONDS"
