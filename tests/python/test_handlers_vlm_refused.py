"""What is refused of mlx-vlm's caches, and what their handlers know of codecs, pools and drafts."""

from __future__ import annotations

import contextlib
import copy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from handler_cases_vlm import CASES, rows
from mlx_lm.models.cache import KVCache as MlxLmKVCache
from mlx_vlm import turboquant
from mlx_vlm.models import cache as vlm
from mlx_vlm.models.deepseek_v41.language import DeepseekV41Cache
from mlx_vlm.models.minimax_m3_vl.language import MiniMaxM3BatchKVCache, MiniMaxM3KVCache
from mlx_vlm.models.qwen4_exp.language import BatchQSAKVCache, QSAQuantizedKVCache
from mlx_vlm.models.unlimited_ocr.language import RingSlidingKVCache
from parts import through_parts

from prefixcache._handlers.turboquant_codecs import Codec
from prefixcache._layer_state import LayerState, flatten
from prefixcache._registry import describe_layers, rebuild_layers
from prefixcache.errors import Unsupported


def refused(reason: str, match: str, act: Callable[[], Any]) -> None:
    with pytest.raises(Unsupported, match=match) as caught:
        act()
    assert caught.value.reason == reason


def kept(name: str, n: int) -> list[LayerState]:
    return through_parts(describe_layers([CASES[name].donor(n)]), n)


def test_nothing_of_mlx_vlm_is_imported() -> None:
    code = "import sys, prefixcache._registry; sys.exit(any(m.startswith('mlx_vlm') for m in sys.modules))"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "cache",
    [
        vlm.BatchKVCache([0]),
        vlm.BatchRotatingKVCache(8, [0]),
        vlm.BatchQuantizedKVCache([0]),
        vlm.BatchPoolingCache(4, [0]),
        turboquant.BatchTurboQuantKVCache([0], 4),
        MiniMaxM3BatchKVCache([0]),
        BatchQSAKVCache([0]),
    ],
    ids=lambda cache: type(cache).__name__,
)
def test_batches_are_refused_with_advice(cache: Any) -> None:
    refused("unsupported_type", r"extract each row first: extract\(i\)", lambda: describe_layers([cache]))


@pytest.mark.parametrize("cache", [vlm.StaticPrefixKVCache(8), QSAQuantizedKVCache()], ids=lambda c: type(c).__name__)
def test_classes_without_a_handler(cache: Any) -> None:
    refused("unsupported_type", f"no handler for mlx_vlm.*{type(cache).__name__}", lambda: describe_layers([cache]))


@pytest.mark.parametrize(
    ("name", "prototype"),
    [
        ("pooling-4", vlm.PoolingCache(8)),
        ("arrays-3", vlm.ArraysCache(2)),
        ("buffered-16-0-7", vlm.BufferedRotatingKVCache(17)),
        ("buffered-16-0-7", vlm.BufferedRotatingKVCache(16, 4)),
        ("buffered-16-0-7", vlm.RotatingKVCache(16)),
        ("rotating-16-4", vlm.RotatingKVCache(16)),
        ("chunked-32", vlm.ChunkedKVCache(33)),
        ("ring-sliding", RingSlidingKVCache(7)),
        ("deepseek-v41", DeepseekV41Cache(4)),
        ("hy-v4", vlm.KVCache()),
        ("qsa", vlm.KVCache()),
        ("turbo-4", turboquant.TurboQuantKVCache(3)),
        ("turbo-4", turboquant.TurboQuantKVCache(4, seed=1)),
        ("turbo-4", turboquant.TurboQuantKVCache(4, value_bits=3)),
        ("turbo-4", MlxLmKVCache()),
        ("hybrid", MlxLmKVCache()),
        ("hybrid", CASES["hybrid-split"].fresh()),
        ("list", vlm.CacheList(vlm.KVCache(), vlm.PoolingCache(4))),
    ],
)
def test_other_settings_of_the_model(name: str, prototype: Any) -> None:
    refused("structure_mismatch", "layer 0 ", lambda: rebuild_layers([prototype], kept(name, 20), 20))


def test_a_running_request() -> None:
    for name, value in (("left_padding", mx.array([1])), ("lengths", mx.array([3]))):
        arrays = CASES["arrays-2"].donor(10)
        setattr(arrays, name, value)
        refused("running_request", name, lambda arrays=arrays: describe_layers([arrays]))
    for name in ("arrays-2", "pooling-4"):
        cache = CASES[name].donor(10)
        cache.start_speculation(2)
        refused("running_request", "draft", lambda cache=cache: describe_layers([cache]))
        cache.abort_speculation()
        assert describe_layers([cache])[0].slots
    ring = CASES["ring-sliding"].donor(10)
    ring.update_and_fetch(rows(1, 8, 10, 11), rows(2, 8, 10, 11))
    refused("running_request", "decoding has begun after 10 tokens", lambda: describe_layers([ring]))


def test_several_sequences() -> None:
    for name in ("pooling-4", "turbo-4", "qsa", "minimax", "buffered-16-0-7", "z1t"):
        cache = CASES[name].donor(10)
        described = describe_layers([cache])[0].slots[0].name
        owner, field = [*described.split("."), ""][:2]
        double = mx.concatenate([getattr(getattr(cache, owner), field) if field else _array(cache, owner)] * 2)
        if field:
            setattr(cache, owner, getattr(cache, owner)._replace(**{field: double}))
        else:
            setattr(getattr(cache, "kv_cache", cache), owner, double)
        with pytest.raises(ValueError, match=r"holds 2 sequences.*extract the row first"):
            describe_layers([cache])


def _array(cache: Any, name: str) -> mx.array:
    found: mx.array = getattr(getattr(cache, "kv_cache", cache), name)
    return found


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        ("buffered-16-0-7", {"start_position": 3}, "does not fit start_position=3"),
        ("buffered-16-0-7", {"_idx": -1}, "_idx must be at least 0"),
        ("buffered-16-0-7", {"keep": 16}, "keep must be below max_size"),
        ("minimax", {"index_offset": 9}, "index_offset 9 at offset 10"),
        ("simple", {"cache_length": 9}, "cache_length 9 but 10 rows"),
        ("pooling-4", {"remainder": 4}, "remainder must be below ratio"),
        ("pooling-4", {"buf_gate": None}, "buffers of shapes"),
        ("deepseek-v41", {"n_layers": 2}, "must be a list of 2 arrays"),
        ("qsa", {"index_position_ids": None}, "not set beside"),
        ("qsa", {"index_keys": mx.zeros((1, 9, 8))}, "beyond indexer arrays"),
        ("turbo-4", {"values": None}, "values not set at offset 10"),
        ("turbo-4", {"offset": 11}, "offset 11 is beyond the 10 rows"),
        ("turbo-4", {"bits": "4"}, "bits must be a number"),
        ("hybrid", {"offset": 11}, "offset 11 is beyond the 10 rows"),
    ],
)
def test_caches_that_contradict_themselves(name: str, change: dict[str, Any], match: str) -> None:
    cache = CASES[name].donor(10)
    for field, value in change.items():
        setattr(cache, field, value)
    with pytest.raises((ValueError, TypeError), match=match):
        describe_layers([cache])


def test_an_inner_cache_of_another_class() -> None:
    cache = MiniMaxM3KVCache()
    cache.kv_cache = vlm.QuantizedKVCache()
    refused("unsupported_type", "kv_cache must be mlx-vlm's KVCache", lambda: describe_layers([cache]))


def test_slots_of_turboquant_are_named_by_their_path() -> None:
    (state,) = describe_layers([CASES["turbo-split"].donor(10)])
    names = [slot.name.rpartition(".")[0] for slot in state.slots]
    paths = ("low.norms", "low.indices", "high.norms", "high.indices")
    assert names == [f"{owner}.{path}" for owner in ("keys", "values") for path in paths]
    assert {slot.seq_axis for slot in state.slots} == {2}
    (state,) = describe_layers([CASES["turbo-polar"].donor(10)])
    names = [slot.name.rpartition(".")[0] for slot in state.slots]
    assert [name for name in names if "level" in name and "keys" in name] == [
        f"keys.polar_state.level_indices.{level}" for level in range(4)
    ]


def test_split_channels_belong_to_the_structure() -> None:
    """They depend on the first tokens that a codec saw: rows of two such codecs must never meet in one cache."""
    caches = []
    for scale in (1.0, 100.0):
        cache = turboquant.TurboQuantKVCache(3.5, key_bits=3.5)
        keys = rows(1, 64, 0, 8, dtype=mx.float16)
        cache.update_and_fetch(mx.concatenate([keys[..., :8] * scale, keys[..., 8:]], axis=-1), keys)
        caches.append(cache)
    first, second = (describe_layers([cache])[0].meta for cache in caches)
    assert first["keys.high"] != second["keys.high"]
    assert {name for name in first if first[name] != second[name]} == {"keys.high"}
    # A store joins rows of slots with equal names, whatever the rest of the structure says.
    keys = [{name for name, _ in flatten(describe_layers([cache])) if "/keys." in name} for cache in caches]
    assert not keys[0] & keys[1]


def test_codecs_that_their_seed_does_not_determine() -> None:
    other_seed = CASES["turbo-4"].donor(10)
    other_seed.seed = 5
    refused("unsupported_type", "other matrices than those of seed 5", lambda: describe_layers([other_seed]))
    changed = copy.deepcopy(CASES["turbo-4"].donor(10))
    changed.key_codec.codebook = changed.key_codec.codebook * 2
    refused("unsupported_type", "other matrices", lambda: describe_layers([changed]))
    foreign = CASES["turbo-4"].donor(10)
    foreign.key_codec = CASES["turbo-4"]
    refused("unsupported_type", "codec of class Case", lambda: describe_layers([foreign]))
    mixed = CASES["turbo-4"].donor(10)
    mixed.key_codec = turboquant._TurboQuantProdCodec(64, 4, 0)
    refused("unsupported_type", "a codec prod makes", lambda: describe_layers([mixed]))


def changed(state: LayerState, change: dict[str, Any]) -> LayerState:
    """The layer with other settings and, where they make a codec, with slots that are named after it."""
    meta, slots = {**state.meta, **change}, state.slots
    with contextlib.suppress(Unsupported):
        tags = {owner: Codec.from_meta(meta, owner, "").tag for owner in ("keys", "values")}
        names = [f"{slot.name.rpartition('.')[0]}.{tags[slot.name.split('.')[0]]}" for slot in slots]
        slots = tuple(replace(slot, name=name) for slot, name in zip(slots, names, strict=True))
    return LayerState(state.type_name, slots, meta, offset=10)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"keys.kind": "rice"}, "no codec of keys"),
        ({"keys.dim": -1}, "no codec of keys"),
        ({"keys.dim": None}, "no codec of keys"),
        ({"keys.bits": 3.5}, "no codec of keys"),
        ({"keys.high": "f"}, "no codec of keys"),
        ({"keys.kind": "split.mse", "keys.bits": 3.5, "keys.high": "xyz"}, "no codec of keys"),
        ({"keys.matrices": "0123456789abcdef"}, "draws other matrices"),
        ({"keys.kind": "prod"}, "a codec prod makes"),
    ],
)
def test_stored_codecs_are_not_taken_on_trust(change: dict[str, Any], match: str) -> None:
    (state,) = kept("turbo-4", 10)
    damaged = changed(state, change)
    fresh = CASES["turbo-4"].fresh()
    refused("structure_mismatch", match, lambda: rebuild_layers([fresh], [damaged], 10))


def test_a_stored_width_that_does_not_fit_its_codec() -> None:
    """Before any matrix is drawn: a damaged dimension must not cost memory."""
    (state,) = kept("turbo-4", 10)
    damaged = changed(state, {"keys.dim": 1 << 40})
    with pytest.raises(ValueError, match=r"keys.indices of shape .* does not fit 4 bits of 1099511627776"):
        rebuild_layers([CASES["turbo-4"].fresh()], [damaged], 10)


def test_pooled_rows_count_tokens() -> None:
    (state,) = describe_layers([CASES["pooling-4"].donor(10)])
    assert (state.offset, state.meta, [slot.name for slot in state.slots]) == (
        10,
        {"ratio": 4},
        ["buf_kv", "buf_gate", "pooled"],
    )
    with pytest.raises(ValueError, match="2 pooled rows of 4 tokens do not fit 13 tokens"):
        rebuild_layers([vlm.PoolingCache(4)], kept("pooling-4", 10), 13)


def test_draft_after_a_restore() -> None:
    """A rejected draft is taken back from a rebuilt window as from the donor."""
    case = CASES["buffered-16-0-7"]
    donor = case.donor(40)
    (rebuilt,) = rebuild_layers([case.fresh()], through_parts(describe_layers([donor]), 40), 40)
    for cache in (donor, rebuilt):
        cache.update_and_fetch(rows(1, 8, 40, 46), rows(2, 8, 40, 46))
        assert cache.trim(5) == 5
    for name in ("keys", "values"):
        newest = [getattr(c, name)[:, :, c._idx - 16 : c._idx] for c in (donor, rebuilt)]
        assert mx.array_equal(*newest)
    assert donor.offset == rebuilt.offset == 41


def test_masks_hide_what_a_rebuilt_window_lacks() -> None:
    """Against the donor as it is, older rows and all: the rows that a query sees are the same."""
    case = CASES["buffered-16-0-7"]
    donor = case.donor(40)
    assert donor._idx > 16
    (rebuilt,) = rebuild_layers([case.fresh()], through_parts(describe_layers([donor]), 40), 40)
    visible = []
    for cache in (donor, rebuilt):
        mask = cache.make_mask(3, return_array=True)
        keys, _ = cache.update_and_fetch(rows(1, 8, 40, 43), rows(2, 8, 40, 43))
        visible.append([keys[0, :, [i for i, seen in enumerate(row) if seen]] for row in mask.tolist()])
    assert all(mx.array_equal(left, right) for left, right in zip(*visible, strict=True))


def test_every_array_of_a_stored_cache_is_used() -> None:
    for name, case in CASES.items():
        states = kept(name, 20)
        (rebuilt,) = rebuild_layers([case.fresh()], states, 20)
        again = flatten(describe_layers([rebuilt]))
        assert [slot_name for slot_name, _ in again] == [slot_name for slot_name, _ in flatten(states)], name
