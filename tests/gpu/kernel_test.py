"""The CUDA twin of the gather kernel on a real GPU, through mx.fast.cuda_kernel: every byte of every output.

Usage: kernel_test.py CASES [KERNELS] (written by write_cases test). Runs the cases of KERNELS kernels for each width of
unit, since each kernel takes seconds to compile. Ends with status 1 if a case failed, or if a width had none.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

import mlx.core as mx
import numpy as np

Case = dict[str, Any]
# Outputs hold this number before the kernel runs; every dtype here has it.
POISON = 37


def arena_bytes(slab: int, size: int) -> np.ndarray:
    """What write_cases' arena_byte says lies in a slab."""
    at = np.arange(1, size + 1, dtype=np.uint32)
    mixed = at * np.uint32(0x9E3779B1) + np.uint32(slab * 0x85EBCA6B & 0xFFFFFFFF)
    return (mixed >> np.uint32(15)).astype(np.uint8)


def poison(dtype: str) -> np.ndarray:
    """The bytes of POISON in this dtype."""
    if dtype == "bfloat16":
        return np.frombuffer(np.float32(POISON).tobytes()[2:], np.uint8)
    return np.frombuffer(np.dtype(dtype).type(POISON).tobytes(), np.uint8)


def wanted(case: Case, tensor: int, slabs: list[np.ndarray]) -> np.ndarray:
    """The bytes of one output: uint8 [heads, capacity, row_bytes]."""
    heads, row_bytes, capacity = case["heads"], case["row_bytes"], case["capacity"]
    fill = poison(case["dtype"])
    out = np.tile(fill, heads * capacity * row_bytes // len(fill)).reshape(heads, capacity, row_bytes)
    if case["clear_spare"]:
        out[:, case["rows"] :] = 0
    for slab, at, layout, stored, lo, hi, place in case["pieces"]:
        start = at + case["offsets"][tensor][layout]
        block = slabs[slab][start : start + heads * stored * row_bytes].reshape(heads, stored, row_bytes)
        out[:, place : place + hi - lo] = block[:, lo:hi]
    return out


def run(case: Case, slabs: list[np.ndarray]) -> list[np.ndarray]:
    text = case["text"]
    kernel = mx.fast.cuda_kernel(
        name=text["name"],
        input_names=text["inputs"],
        output_names=text["outputs"],
        header=text["header"],
        source=text["source"],
        ensure_row_contiguous=False,
    )
    dtype = getattr(mx, case["dtype"])
    shape = (case["heads"], case["capacity"], case["row_bytes"] // dtype.size)
    tensors = len(case["offsets"])
    table = mx.array(np.array(case["words"], np.uint64))
    outputs = kernel(
        inputs=[table, table[case["tensors_at"] :], *(mx.array(slab) for slab in slabs)],
        grid=(case["groups"] * case["lanes"], case["heads"], tensors),
        threadgroup=(case["lanes"], 1, 1),
        output_shapes=[shape] * tensors,
        output_dtypes=[dtype] * tensors,
        init_value=POISON,
    )
    mx.eval(outputs)
    return [np.array(mx.view(out, mx.uint8)).reshape(case["heads"], case["capacity"], -1) for out in outputs]


def failures(case: Case) -> list[str]:
    slabs = [arena_bytes(slab, size) for slab, size in enumerate(case["slab_bytes"])]
    found = []
    for tensor, got in enumerate(run(case, slabs)):
        differ = np.argwhere(got != wanted(case, tensor, slabs))
        if len(differ):
            found.append(f"{case['name']}: tensor {tensor}, {len(differ)} bytes, first at {differ[0].tolist()}")
    return found


def main(path: str, most_kernels: int = 12) -> int:
    with open(path) as file:
        cases = json.load(file)["cases"]
    print(f"MLX {mx.__version__} on {mx.default_device()}")
    kernels: dict[int, set[str]] = {1: set(), 4: set(), 16: set()}
    units: Counter[int] = Counter()
    found: list[str] = []
    for case in cases:
        name, known = case["text"]["name"], kernels[case["unit_bytes"]]
        if case["groups"] == 0 or (name not in known and len(known) == most_kernels):
            continue
        known.add(name)
        units[case["unit_bytes"]] += 1
        found += failures(case)
    compiled = sum(map(len, kernels.values()))
    print(f"{units.total()} cases over {compiled} kernels, by unit {dict(units)}: {len(found)} failures")
    print("\n".join(found[:10]))
    return int(bool(found) or min(units[1], units[4], units[16]) < 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *(int(word) for word in sys.argv[2:])))
