#!/usr/bin/env bash
# On a machine with an NVIDIA GPU:
#   tests/gpu/run.sh prepare             sets up .venv-gpu with MLX's CUDA build, prefixcache, mlx-lm and what tests import
# and there, or where python3 has all of that:
#   tests/gpu/run.sh [test|bench]        the CUDA twin of the gather kernel, tested or measured; without a word: both
#   tests/gpu/run.sh memcheck            a few of the tests' kernels under compute-sanitizer
#   tests/gpu/run.sh suite [FILE ...]    the Python test suite; FILE: all that pytest prints, and more arguments for it
#   tests/gpu/run.sh end-to-end [...]    a real model, cold and restored; arguments of tests/gpu/end_to_end.py
# The first three need NumPy, CMake and a C++20 compiler besides. PREFIXCACHE_GPU_MLX: the extra of MLX (cuda13).
set -euo pipefail
cd "$(dirname "$0")/../.."
if [ "${1:-}" = prepare ]; then
  make .venv/.ready
  # It binds at run time to the MLX that it finds, so it is built beside MLX's CPU build: the two must not meet in one
  # environment.
  rm -f build/gpu/*.whl
  PATH="$PWD/.venv/bin:$PATH" .venv/bin/pip wheel -q --no-deps --no-build-isolation -w build/gpu .
  .venv/bin/python -m venv .venv-gpu
  pip="$PWD/.venv-gpu/bin/python -m pip"
  $pip install -q --upgrade 'pip>=25.1'
  line=$(.venv/bin/python scripts/mlx_lines.py 0.32)
  # shellcheck disable=SC2086
  $pip install -q ${line/cpu/${PREFIXCACHE_GPU_MLX:-cuda13}} --group test
  $pip install -q --no-deps --group test-no-deps
  $pip install -q --no-deps --force-reinstall build/gpu/*.whl
  exit
fi
if [ -x .venv-gpu/bin/python ]; then export PATH="$PWD/.venv-gpu/bin:$PATH:$PWD/.venv/bin"; fi
python3 -c 'import mlx.core as mx; assert mx.cuda.is_available(), "no CUDA device"'
word=${1:-}
case $word in
  suite) exec python3 tests/gpu/suite.py "${@:2}" ;;
  end-to-end) exec python3 tests/gpu/end_to_end.py "${@:2}" ;;
  '' | test | bench | memcheck) ;;
  *)
    sed -n 's/^#  / /p' "$0" >&2
    exit 2
    ;;
esac
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mlx=$(python3 -m mlx --cmake-dir)
cmake -DPROJECT_SOURCE_DIR="$PWD" -DPROJECT_BINARY_DIR="$work" -P cmake/PrefixcacheKernels.cmake
c++ -std=c++20 -O1 -Icsrc -I"$work/include" -Itests/cpp -isystem "$mlx/include" -o "$work/write_cases" \
  tests/gpu/write_cases.cpp csrc/gather/kernel_table.cpp csrc/gather/kernel_source.cpp
if [ "${word:-test}" = test ]; then
  "$work/write_cases" test >"$work/test.json"
  python3 tests/gpu/kernel_test.py "$work/test.json"
fi
if [ "$word" = memcheck ]; then
  "$work/write_cases" test >"$work/test.json"
  compute-sanitizer --tool memcheck --error-exitcode 9 python3 tests/gpu/kernel_test.py "$work/test.json" 2
fi
if [ "${word:-bench}" = bench ]; then
  "$work/write_cases" bench >"$work/bench.json"
  python3 tests/gpu/bench_kernel.py "$work/bench.json"
fi
