"""What a GPU does by itself, for comparison: copies within its memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import mlx.core as mx
import numpy as np

DEVICE_TO_DEVICE = 3


def has_gpu() -> bool:
    """Whether MLX's default device is a GPU."""
    return mx.default_device() == mx.gpu


def device_copy(size: int) -> Callable[[], None]:
    """One copy of ``size`` bytes from one array to another, synchronised: the driver's own on CUDA, elsewhere the
    fastest of MLX's operations that reads and writes each byte once."""
    source = mx.zeros((size // 4 // 1024, 1024), mx.int32) + 1
    mx.eval(source)
    if not mx.cuda.is_available():
        return lambda: _evaluate(mx.bitwise_xor(source, 1))
    to = mx.zeros((size // 4 // 1024, 1024), mx.int32) + 2
    mx.eval(to)
    mx.synchronize()
    runtime = ctypes.CDLL("libcudart.so.13")
    runtime.cudaMemcpyAsync.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_void_p,
    ]
    out, given = addresses([to, source])

    def copy(kept: mx.array = source) -> None:
        if (
            runtime.cudaMemcpyAsync(out, given, min(to.nbytes, kept.nbytes), DEVICE_TO_DEVICE, None)
            or runtime.cudaDeviceSynchronize()
        ):
            raise RuntimeError("the driver could not copy")

    return copy


def addresses(arrays: list[mx.array]) -> list[int]:
    """Where arrays lie in a CUDA device's memory: a kernel writes its arguments down."""
    names = [f"in{i}" for i in range(len(arrays))]
    kernel = mx.fast.cuda_kernel(
        name=f"addresses_{len(arrays)}",
        input_names=names,
        output_names=["places"],
        source="\n".join(f"places[{i}] = reinterpret_cast<uint64_t>({name});" for i, name in enumerate(names)),
    )
    (places,) = kernel(
        inputs=arrays, grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[(len(arrays),)], output_dtypes=[mx.uint64]
    )
    return [int(place) for place in np.array(places)]


def _evaluate(array: mx.array) -> None:
    mx.eval(array)
    mx.synchronize()
