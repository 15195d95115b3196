#!/usr/bin/env bash
# On a machine with an NVIDIA GPU: tests the CUDA twin of the gather kernel, then measures it.
# Needs MLX's CUDA build (python3 -c 'import mlx.core'), NumPy, CMake and a C++20 compiler.
# Usage: tests/gpu/run.sh [test|bench|memcheck]      without a word: test, then bench. memcheck runs a few of the tests'
# kernels under compute-sanitizer.
set -euo pipefail
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -c 'import mlx.core as mx; assert mx.cuda.is_available(), "no CUDA device"'
mlx=$(python3 -m mlx --cmake-dir)
cmake -DPROJECT_SOURCE_DIR="$PWD" -DPROJECT_BINARY_DIR="$work" -P cmake/PrefixcacheKernels.cmake
c++ -std=c++20 -O1 -Icsrc -I"$work/include" -Itests/cpp -isystem "$mlx/include" -o "$work/write_cases" \
  tests/gpu/write_cases.cpp csrc/gather/kernel_table.cpp csrc/gather/kernel_source.cpp
if [ "${1:-test}" = test ]; then
  "$work/write_cases" test >"$work/test.json"
  python3 tests/gpu/kernel_test.py "$work/test.json"
fi
if [ "${1:-}" = memcheck ]; then
  "$work/write_cases" test >"$work/test.json"
  compute-sanitizer --tool memcheck --error-exitcode 9 python3 tests/gpu/kernel_test.py "$work/test.json" 2
fi
if [ "${1:-bench}" = bench ]; then
  "$work/write_cases" bench >"$work/bench.json"
  python3 tests/gpu/bench_kernel.py "$work/bench.json"
fi
