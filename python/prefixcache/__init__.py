"""A prompt cache for MLX language models: KV of shared prefixes, kept in RAM and on SSD, handed back exactly."""

from __future__ import annotations
