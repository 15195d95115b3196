"""Tiny models of random weights for every architecture of mlx-lm."""
