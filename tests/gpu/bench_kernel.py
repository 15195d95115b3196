"""How fast the gather kernel is on a GPU, against device-to-device copies of the same bytes in the same run.

Usage: bench_kernel.py CASES (written by write_cases bench). The geometry is an 8B model's: 32 layers of keys and
values, 8 heads of 128 halves, blocks of 256 rows in shuffled order in one arena. Times are medians; rates count bytes
read plus bytes written.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from device import CudaDriver, addresses  # noqa: E402

Case = dict[str, Any]
TENSORS = 64
RUNS = 25


def median_ms(body: Callable[[], object], runs: int = RUNS) -> tuple[float, float]:
    """Median and spread (of the middle half) of a body that ends synchronised."""
    for _ in range(3):
        body()
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        body()
        times.append((time.perf_counter() - start) * 1e3)
    low, middle, high = statistics.quantiles(times, n=4)
    return middle, high - low


class Gather:
    """All 64 outputs, `outputs` a launch."""

    def __init__(self, case: Case, arena: mx.array, outputs: int):
        text = case["texts"][str(outputs)]
        self.case, self.arena, self.outputs = case, arena, outputs
        # A store binds the same number of slabs in every launch, however many it has.
        self.slabs = len(text["inputs"]) - 2
        self.kernel = mx.fast.cuda_kernel(
            name=text["name"],
            input_names=text["inputs"],
            output_names=text["outputs"],
            header=text["header"],
            source=text["source"],
            ensure_row_contiguous=False,
        )
        self.words = np.array(case["words"], np.uint64)
        self.table = mx.array(self.words)
        self.tensors = self.windows(self.table)
        mx.eval(self.table, self.tensors)

    def windows(self, table: mx.array) -> list[mx.array]:
        """What each launch sees of the tensors' offsets."""
        return [table[self.case["tensors_at"] + first :] for first in range(0, TENSORS, self.outputs)]

    def launch(self, fresh: bool = False, early: bool = True) -> list[mx.array]:
        """Lazy outputs; `fresh` makes the table anew, `early` starts each launch when it is described."""
        case = self.case
        table = mx.array(self.words) if fresh else self.table
        made: list[mx.array] = []
        for i, tensors in enumerate(self.windows(table) if fresh else self.tensors):
            count = min(self.outputs, TENSORS - i * self.outputs)
            some = self.kernel(
                inputs=[table, tensors, *[self.arena] * self.slabs],
                grid=(case["groups"] * case["lanes"], case["heads"], count),
                threadgroup=(case["lanes"], 1, 1),
                output_shapes=[(1, case["heads"], case["capacity"], case["row_bytes"] // 2)] * count,
                output_dtypes=[mx.float16] * count,
            )
            if early:
                mx.async_eval(*some)
            made += some
        return made

    def __call__(self, **how: bool) -> None:
        made = self.launch(**how)
        mx.eval(made)
        mx.synchronize()

    def many(self, times: int) -> None:
        """Several gathers between two synchronisations."""
        last = None
        for _ in range(times):
            last = self.launch()
        mx.eval(last)
        mx.synchronize()


def make_arena(case: Case) -> mx.array:
    images, image_bytes = len(case["pieces"]), case["image_bytes"]
    rows = []
    for i in range(images):
        rows.append(mx.random.randint(-(2**31), 2**31 - 1, (1, image_bytes // 4), mx.int32, key=mx.random.key(i)))
        mx.eval(rows[-1])
    arena = mx.view(mx.concatenate(rows), mx.uint8)
    mx.eval(arena)
    return arena


def concatenated(gather: Gather, tensor: int) -> mx.array:
    """The rows of one output as MLX's own operations give them."""
    case = gather.case
    (start,) = case["offsets"][tensor]
    size = case["heads"] * case["block_rows"] * case["row_bytes"]
    shape = (1, case["heads"], case["block_rows"], case["row_bytes"] // 2)
    blocks = [gather.arena[piece[1] // case["image_bytes"], start : start + size] for piece in case["pieces"]]
    return mx.concatenate([mx.view(block, mx.uint16).reshape(shape) for block in blocks], axis=2)


def exact(gather: Gather) -> bool:
    """A few outputs against slices and one concatenation, and their spare rows against zero."""
    rows = gather.case["rows"]
    made = gather.launch()
    for tensor in (0, 37, 63):
        got = mx.view(made[tensor], mx.uint16)
        if not mx.array_equal(got[:, :, :rows], concatenated(gather, tensor)) or mx.any(got[:, :, rows:] != 0):
            return False
    return True


def kernels_ms(gather: Gather) -> float:
    """What the kernels themselves take, by the driver's own clock: median of several gathers. NaN without PyTorch."""
    try:
        from torch.profiler import ProfilerActivity, profile
    except ImportError:
        return float("nan")
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(10):
            gather()
    times = [event.time_range.elapsed_us() / 1e3 for event in profiler.events() if "prefixcache_gather" in event.name]
    launches = len(gather.tensors)
    assert len(times) == 10 * launches, f"{len(times)} kernels seen"
    return statistics.median(sum(times[i : i + launches]) for i in range(0, len(times), launches))


def copies(gather: Gather, total: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """Copies from the arena to the very outputs, one each, and one copy of everything."""
    driver = CudaDriver()
    made = gather.launch()
    mx.eval(made)
    (arena,) = addresses([gather.arena])
    outs = addresses(made)
    mx.synchronize()
    size = total // 2 // TENSORS

    def one_each() -> None:
        for i, out in enumerate(outs):
            driver.copy(out, arena + i * size, size)
        driver.wait()

    each = median_ms(one_each)
    del made
    gc.collect()
    whole = mx.ones((TENSORS, total // 2 // 4 // TENSORS), mx.int32)
    mx.eval(whole)
    (to,) = addresses([whole])

    def everything() -> None:
        driver.copy(to, arena, total // 2)
        driver.wait()

    return each, median_ms(everything)


def show(name: str, total: int, ms: float, spread: float, other_ms: float, other: str = "a copy") -> None:
    speed = f"{other_ms / ms:.3f} of {other}"
    print(f"  {name:34} {ms:8.3f} ms +-{spread:6.3f} {total / ms / 1e6:6.0f} GB/s  {speed}", flush=True)


def measure(cases: list[Case], tokens: int, block_rows: int, launches: list[int]) -> None:
    tight, roomy = (case for case in cases if case["rows"] == tokens and case["block_rows"] == block_rows)
    total = 2 * TENSORS * tight["heads"] * tokens * tight["row_bytes"]
    arena = make_arena(tight)
    mx.clear_cache()
    copy_ms = None
    for outputs in launches:
        gather = Gather(tight, arena, outputs)
        right = exact(gather) and exact(Gather(roomy, arena, outputs))
        if copy_ms is None:
            each, whole = copies(gather, total)
            copy_ms = whole[0]
            print(f"{tokens} tokens in blocks of {block_rows}, {total / 1e9:.2f} GB read and written")
            show("one copy of everything", total, *whole, copy_ms)
            show("64 copies, to the same outputs", total, *each, copy_ms)
        print(f"  {outputs} outputs a launch, {'exact' if right else 'WRONG'}")
        show("  kernels alone", total, kernels_ms(gather), 0, copy_ms)
        show("  synchronised each time", total, *median_ms(gather), copy_ms)
        show("  same, table made anew", total, *median_ms(lambda g=gather: g(fresh=True)), copy_ms)
        ms, spread = median_ms(lambda g=gather: g.many(4))
        show("  4 gathers in a row, each", total, ms / 4, spread / 4, copy_ms)
        if not right:
            raise SystemExit("a gather gave other bytes")
    del arena, gather
    gc.collect()
    mx.clear_cache()


def measure_others(cases: list[Case], tokens: int) -> None:
    """MLX's own way, and an arena that the CPU has filled: the device fetches its pages at the first use."""
    case = next(case for case in cases if case["rows"] == tokens)
    total = 2 * TENSORS * case["heads"] * tokens * case["row_bytes"]
    gather = Gather(case, make_arena(case), 16)
    ours, kernels = median_ms(gather)[0], kernels_ms(gather)

    def concatenate() -> None:
        mx.eval([concatenated(gather, tensor) for tensor in range(TENSORS)])
        mx.synchronize()

    print(f"{tokens} tokens in blocks of 256, beside the gather's {ours:.3f} ms")
    show("mx.concatenate of slices", total, *median_ms(concatenate, 7), ours, "the gather")
    shape = (len(case["pieces"]), case["image_bytes"])
    filled = mx.array(np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8))
    gather = Gather(case, filled, 16)
    start = time.perf_counter()
    gather()
    show("arena filled by the CPU, first use", total, (time.perf_counter() - start) * 1e3, 0, ours, "the gather")
    if not exact(gather):
        raise SystemExit("a gather gave other bytes")
    show("arena filled by the CPU, later", total, *median_ms(gather), ours, "the gather")
    show("  kernels alone", total, kernels_ms(gather), 0, kernels, "the gather")


def main(path: str) -> None:
    with open(path) as file:
        cases = json.load(file)["cases"]
    print(
        f"MLX {mx.__version__} on {mx.default_device()}; medians of {RUNS}, +- the middle half; speed 1 is one copy's"
    )
    for tokens in (8192, 16384, 32768, 65536):
        measure(cases, tokens, 256, [16, 64, 8, 1] if tokens == 32768 else [16])
    measure(cases, 32768, 32, [16])
    measure_others(cases, 8192)


if __name__ == "__main__":
    main(sys.argv[1])
