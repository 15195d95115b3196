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
    driver = CudaDriver()
    out, given = addresses([to, source])

    def copy(kept: mx.array = source) -> None:
        driver.copy(out, given, min(to.nbytes, kept.nbytes))
        driver.wait()

    return copy


class CudaDriver:
    """The driver's own copies from device to device. RuntimeError where one fails."""

    def __init__(self) -> None:
        self._runtime = ctypes.CDLL("libcudart.so.13")
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._runtime.cudaMemcpyAsync.argtypes = [pointer, pointer, size, ctypes.c_int, pointer]

    def copy(self, to: int, source: int, size: int) -> None:
        """Starts a copy between two addresses."""
        _checked(self._runtime.cudaMemcpyAsync(to, source, size, DEVICE_TO_DEVICE, None))

    def wait(self) -> None:
        """Waits until the device has nothing left to do."""
        _checked(self._runtime.cudaDeviceSynchronize())


def _checked(status: int) -> None:
    if status != 0:
        raise RuntimeError(f"CUDA error {status}")


def addresses(arrays: list[mx.array]) -> list[int]:
    """Where arrays lie in a CUDA device's memory: a kernel writes its arguments down."""
    names = [f"in{i}" for i in range(len(arrays))]
    types = "_".join(sorted({str(a.dtype)[9:] for a in arrays}))
    kernel = mx.fast.cuda_kernel(
        name=f"addresses_{len(arrays)}_{types}",
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
