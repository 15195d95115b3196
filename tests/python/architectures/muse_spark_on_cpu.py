"""muse_spark's fused kernels in plain array operations: the module has them for Metal only."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import mlx.core as mx


def plain_kernels(module: ModuleType) -> None:
    """Puts the functions below in place of the kernels that ``module`` imported."""
    for kernel in (expert_routing, norm_add_norm, post_expert_norm_combine, pre_norm, qk_norm, qk_norm_rope):
        setattr(module, kernel.__name__, kernel)
    module.rms_norm_sigmoid_gate = rms_norm_sigmoid_gate


def expert_routing(
    logits: mx.array, expert_bias: mx.array, *, top_k: int, multiplier: float, score_eps: float, route_scale: float
) -> tuple[mx.array, mx.array]:
    """The experts with the best biased scores, and their scores in parts of their sum."""
    scores = mx.sigmoid(logits * multiplier)
    experts = mx.argsort(-(scores + expert_bias), axis=-1)[..., :top_k]
    chosen = mx.take_along_axis(scores, experts, axis=-1)
    return experts, chosen / (chosen.sum(axis=-1, keepdims=True) + score_eps) * route_scale


def norm_add_norm(
    branch: mx.array,
    stream: mx.array,
    *,
    alpha: mx.array,
    beta: mx.array,
    post_weight: mx.array | None,
    post_eps: float,
    next_norm: Any,
) -> tuple[mx.array, mx.array | None]:
    """The stream after a branch was added to it, and its norm for the next branch."""
    scaled = branch if post_weight is None else post_weight.astype(branch.dtype) * branch
    stream = alpha * stream + beta * mx.fast.rms_norm(scaled, None, post_eps)
    return stream, None if next_norm is None else pre_norm(stream, next_norm, dtype=branch.dtype)


def pre_norm(stream: mx.array, norm: Any, *, dtype: mx.Dtype) -> mx.array:
    return mx.fast.rms_norm(stream, norm.weight, norm.eps).astype(dtype)


def post_expert_norm_combine(experts: mx.array, weights: mx.array, *, norm_weight: mx.array, eps: float) -> mx.array:
    """The weighted sum of the experts' normed outputs."""
    normed = mx.fast.rms_norm(norm_weight * experts, None, eps)
    return (normed * weights[..., None]).sum(axis=-2).astype(experts.dtype)


def qk_norm(
    qkvg: mx.array, *, n_heads: int, n_kv_heads: int, head_dim: int, eps: float, query_scale: float
) -> tuple[mx.array, mx.array]:
    """Queries and keys ``[B, L, heads, head_dim]``, normed by head; the queries scaled."""
    ends = [n_heads * head_dim, (n_heads + n_kv_heads) * head_dim]
    queries, keys, _ = mx.split(qkvg, ends, axis=-1)
    queries, keys = (mx.fast.rms_norm(mx.unflatten(part, -1, (-1, head_dim)), None, eps) for part in (queries, keys))
    return queries * query_scale, keys


def qk_norm_rope(
    qkvg: mx.array, *, rope_base: float, offset: int | mx.array, head_dim: int, **norm: Any
) -> tuple[mx.array, mx.array]:
    """``qk_norm``, then every head turned by its position, which starts at ``offset``."""
    queries, keys = (
        mx.fast.rope(
            part.swapaxes(1, 2), head_dim, traditional=True, base=rope_base, scale=1.0, offset=offset
        ).swapaxes(1, 2)
        for part in qk_norm(qkvg, head_dim=head_dim, **norm)
    )
    return queries, keys


def rms_norm_sigmoid_gate(x: mx.array, gate: mx.array, *, eps: float) -> mx.array:
    """Attention output ``[B, H, L, D]``, normed by head and gated, as ``[B, L, H * D]``."""
    return mx.fast.rms_norm(x, None, eps).swapaxes(1, 2).flatten(-2) * mx.sigmoid(gate)
