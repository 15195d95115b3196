"""Chunked caches: where a rebuilt one starts, and that Llama 4's masks and rows are those of the donor.

mlx-lm before 0.32 cuts the front by the buffer's length, padding included: deeper than to the chunk, and wrongly where
the chunk is no multiple of the growth step.
"""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import pytest
from handler_cases import OLD_CHUNKS
from mlx_lm.models.cache import ChunkedKVCache, KVCache
from parts import RowsMissing, through_parts

from prefixcache._layer_state import LayerState, Slot, window_of
from prefixcache._registry import describe_layers, reaches_of, rebuild_layers
from prefixcache.errors import Unsupported

exact_cut = pytest.mark.skipif(OLD_CHUNKS, reason="mlx-lm before 0.32 cuts chunked caches deeper than to the chunk")


def _append(cache: Any, start: int, count: int, cut: bool = True) -> list[list[int]]:
    """Appends rows that say where they belong, as a model does; gives the rows that attention sees."""
    if cut and isinstance(cache, ChunkedKVCache):
        cache.maybe_trim_front()
    ramp = mx.arange(start, start + count, dtype=mx.float32).reshape(1, 1, -1, 1)
    rows = mx.broadcast_to(ramp, (1, 2, count, 4))
    return [[int(x) for x in array[0, 0, :, 0].tolist()] for array in cache.update_and_fetch(rows, rows)]


def _fed(chunk_size: int, *chunks: int) -> Any:
    cache, start = ChunkedKVCache(chunk_size), 0
    for count in chunks:
        _append(cache, start, count)
        start += count
    return cache


@exact_cut
@pytest.mark.parametrize("chunk_size", [8, 256, 300])
def test_rows_begin_at_the_start_position(chunk_size: int) -> None:
    for chunks in ((3,), (chunk_size,), (chunk_size + 5,), (chunk_size + 5, 4), (chunk_size, 9, 1, 1)):
        cache, offset = _fed(chunk_size, *chunks), sum(chunks)
        (state,) = describe_layers([cache])
        assert (state.meta, state.offset) == ({"chunk_size": chunk_size}, offset)
        for slot in state.slots:
            assert slot.reach == window_of(chunk_size)
            assert slot.first_row == cache.start_position
            assert slot.head is None
            held = slot.data[0, 0, : offset - slot.first_row, 0].tolist()
            assert held == list(range(slot.first_row, offset))


@exact_cut
@pytest.mark.parametrize("chunk_size", [1, 8, 300])
@pytest.mark.parametrize("spare", [0, 5, 400])
def test_starts_where_the_donor_would(chunk_size: int, spare: int) -> None:
    for n in (1, chunk_size, chunk_size + 1, 2 * chunk_size + 3):
        donor = _fed(chunk_size, n)
        states = through_parts(describe_layers([donor]), n, spare)
        (rebuilt,) = rebuild_layers([ChunkedKVCache(chunk_size)], states, n)
        assert (rebuilt.offset, rebuilt.start_position) == (n, max(0, n - chunk_size))
        assert rebuilt.keys.shape[2] == min(chunk_size, n + spare)
        donor.maybe_trim_front()
        assert rebuilt.start_position == donor.start_position
        rebuilt.maybe_trim_front()
        assert rebuilt.start_position == donor.start_position
        for start, count in ((n, 2), (n + 2, 1), (n + 3, 260)):
            assert _append(rebuilt, start, count) == _append(donor, start, count)
            assert rebuilt.start_position == donor.start_position


@exact_cut
def test_all_layers_start_together() -> None:
    """The model makes one mask for all of them from the first."""
    donors = [_fed(8, 5, 6, 9), _fed(8, 5, 6, 9)]
    for n in (19, 20):
        states = through_parts(describe_layers(donors), n)
        rebuilt = rebuild_layers([ChunkedKVCache(8), ChunkedKVCache(8)], states, n)
        assert [cache.start_position for cache in rebuilt] == [n - 8] * 2


@exact_cut
def test_earliest_n() -> None:
    donor = _fed(8, 20, 5)
    states = describe_layers([donor])
    assert states[0].slots[0].first_row == 12
    for n in (20, 23, 25):
        (rebuilt,) = rebuild_layers([ChunkedKVCache(8)], through_parts(states, n), n)
        assert _append(rebuilt, n, 1) == [list(range(n - 8, n + 1))] * 2
    for n in (1, 8, 19, 26):
        with pytest.raises(RowsMissing):
            through_parts(states, n)


@exact_cut
def test_rows_behind_a_trimmed_end_are_garbage() -> None:
    donor = _fed(8, 20, 5)
    donor.trim(3)
    states = describe_layers([donor])
    assert states[0].offset == 22
    with pytest.raises(RowsMissing):
        through_parts(states, 23)
    (rebuilt,) = rebuild_layers([ChunkedKVCache(8)], through_parts(states, 22, 4), 22)
    assert _append(rebuilt, 22, 2) == _append(donor, 22, 2)


@exact_cut
def test_trimmed_to_its_start_cannot_be_stood_at() -> None:
    """After a trim that went into the front the rows before it are gone for ever."""
    donor = _fed(8, 20, 5)
    donor.trim(10)
    (state,) = describe_layers([donor])
    assert (state.offset, state.slots[0].first_row) == (15, 12)
    with pytest.raises(RowsMissing):
        through_parts([state], 15)


@exact_cut
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"start_position": -1}, "start_position must be at least 0, got -1"),
        ({"start_position": 26}, "start_position 26 is beyond offset 25"),
        ({"start_position": None}, "start_position must be an int, not NoneType"),
        ({"chunk_size": 0}, "chunk_size must be at least 1, got 0"),
        ({"chunk_size": 8.0}, "chunk_size must be an int, not float"),
        ({"offset": 1000}, "offset 1000 is beyond"),
        ({"start_position": 0, "offset": 400}, "offset 400 is beyond"),
    ],
)
def test_caches_that_contradict_themselves(changes: dict[str, Any], message: str) -> None:
    cache = _fed(8, 20, 5)
    describe_layers([cache])
    for name, value in changes.items():
        setattr(cache, name, value)
    with pytest.raises((ValueError, TypeError), match=f"layer 0 .*{message}"):
        describe_layers([cache])


@exact_cut
def test_another_chunk_size_than_the_models() -> None:
    states = through_parts(describe_layers([_fed(8, 20)]), 20)
    for prototype in (ChunkedKVCache(7), ChunkedKVCache(9), KVCache()):
        with pytest.raises(Unsupported, match="layer 0") as caught:
            rebuild_layers([prototype], states, 20)
        assert caught.value.reason == "structure_mismatch"
    (state,) = states
    with pytest.raises(Unsupported, match="layer 0 .*own"):
        rebuild_layers([ChunkedKVCache(8)], [LayerState(state.type_name, state.slots, {}, offset=20)], 20)


@exact_cut
def test_too_few_rows() -> None:
    states = through_parts(describe_layers([_fed(8, 5)]), 5)
    with pytest.raises(ValueError, match="layer 0 .* 6 is beyond the 5 rows"):
        rebuild_layers([ChunkedKVCache(8)], states, 6)


def _llama4(chunk: int) -> Any:
    from mlx_lm.models import llama4

    text = {
        "attention_bias": False,
        "attention_chunk_size": chunk,
        "head_dim": 8,
        "hidden_act": "silu",
        "hidden_size": 16,
        "interleave_moe_layer_step": 2,
        "intermediate_size": 16,
        "intermediate_size_mlp": 16,
        "max_position_embeddings": 512,
        "model_type": "llama4_text",
        "num_attention_heads": 2,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "num_local_experts": 2,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "use_qk_norm": True,
        "vocab_size": 64,
    }
    mx.random.seed(5)
    model = llama4.Model(llama4.ModelArgs.from_dict({"model_type": "llama4", "text_config": text}))
    mx.eval(model.parameters())
    return model


CHUNK = 256 if OLD_CHUNKS else 16


def _recorded(donor: list[Any], before: list[LayerState]) -> list[LayerState]:
    """The rows of every token so far: those captured before, and those that the caches have now."""
    states = []
    for number, state in enumerate(describe_layers(donor)):
        slots = []
        for i, slot in enumerate(state.slots):
            assert state.offset is not None
            rows = slot.data[:, :, : state.offset - slot.first_row]
            if slot.first_row:
                rows = mx.concatenate([before[number].slots[i].data[:, :, : slot.first_row], rows], axis=2)
            slots.append(Slot(slot.name, mx.contiguous(rows), slot.seq_axis, slot.reach))
        states.append(LayerState(state.type_name, tuple(slots), state.meta, offset=state.offset))
    mx.eval([slot.data for state in states for slot in state.slots])
    return states


@pytest.mark.parametrize("n", [3, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK - 3, 2 * CHUNK + 5, 3 * CHUNK])
@pytest.mark.parametrize("spare", [0, 40])
def test_llama4_gives_the_donors_logits(n: int, spare: int) -> None:
    """Attention looks at the tokens of the same chunk, wherever the rows begin. Rows are captured after each piece of
    a prefill, in pieces that divide the growth step; the reference is the donor itself."""
    model, tokens = _llama4(CHUNK), mx.random.randint(0, 64, (1, n + 80), key=mx.random.key(n))
    donor, states = model.make_cache(), []
    for start in range(0, n, CHUNK // 4):
        mx.eval(model(tokens[:, start : min(n, start + CHUNK // 4)], cache=donor))
        states = _recorded(donor, states)
    assert {type(cache) for cache in donor} == {ChunkedKVCache, KVCache}
    restored = rebuild_layers(model.make_cache(), through_parts(states, n, spare), n)
    for start, stop in ((n, n + 1), (n + 1, n + 8), (n + 8, n + 9), (n + 9, n + 30)):
        seen, expected = (model(tokens[:, start:stop], cache=caches) for caches in (restored, donor))
        assert mx.array_equal(seen, expected).item(), (start, stop)
        starts = {cache.start_position for cache in restored if isinstance(cache, ChunkedKVCache)}
        assert starts == {cache.start_position for cache in donor if isinstance(cache, ChunkedKVCache)}


@pytest.mark.skipif(not OLD_CHUNKS, reason="mlx-lm since 0.32 cuts any chunk rightly")
@pytest.mark.parametrize("chunk_size", [1, 8, 255, 300])
def test_chunks_whose_rows_get_lost_are_refused(chunk_size: int) -> None:
    for use in (describe_layers, reaches_of):
        with pytest.raises(Unsupported, match=f"layer 0 .*no multiple of 256, and of {chunk_size} too") as caught:
            use([ChunkedKVCache(chunk_size)])
        assert caught.value.reason == "unsupported_type"


@exact_cut
def test_a_cache_is_only_read() -> None:
    cache = _fed(8, 20, 5)
    before = copy.copy(vars(cache))
    describe_layers([cache])
    assert vars(cache) == before
