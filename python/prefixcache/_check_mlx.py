"""Refuses another MLX than the one this build belongs to, before the extension is loaded.

An extension sees MLX's arrays only if both were built with the same nanobind, and that changes between patch releases.
"""

from __future__ import annotations

import mlx.core as mx

from prefixcache._build_info import MLX_VERSION

_found = getattr(mx, "__version__", "unknown")
if _found != MLX_VERSION:
    raise ImportError(
        f"this prefixcache was built for MLX {MLX_VERSION}, but MLX {_found} is installed: "
        f"pip install 'mlx=={MLX_VERSION}' (on Linux 'mlx[cpu]=={MLX_VERSION}'), or build prefixcache for that MLX"
    )
