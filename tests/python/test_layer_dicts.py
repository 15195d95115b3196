"""Layer dicts: every cache class there and back, in every form of either line, and nothing but ValueError."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from conftest import child_environment
from handler_cases import CASES, OLD_CHUNKS, HandlerCase
from handler_cases_vlm import CASES as VLM_CASES
from handler_cases_vlm import Case
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)
from omlx_layers import check_same_layers, plain, rows, states, window
from parts import same, through_parts

from prefixcache._omlx.layer_dicts import (
    layer_dict,
    live_caches,
    omlx_form,
    sub_layers,
    undressed,
    with_offset,
    wrap_restored,
)
from prefixcache._omlx.sized_arrays import SizedArraysCache
from prefixcache._registry import common_offset, describe_layers, rebuild_layers
from prefixcache._rotating_subclass import PrefillReadyRotatingKVCache
from prefixcache.errors import Unsupported

PLANS = {"empty": [], "one": [1], "short": [5], "long": [300], "ring": [20] + [1] * 30, "mixed": [300, 1, 1, 5]}
LM = [case for case in CASES if not case.id.startswith("deepseek")]
# Their states do not say all that they hold, or mlx-vlm cannot take one back.
NOT_BACK = ("hybrid", "deepseek-v41", "buffered-16-4-7")
VLM = {name: case for name, case in VLM_CASES.items() if not name.startswith(NOT_BACK)}


def filled(case: HandlerCase, plan: Sequence[int]) -> Any:
    cache, start = case.make(), 0
    for count in plan:
        mx.eval(case.feed(cache, start, count))
        start += count
    return cache


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
@pytest.mark.parametrize("case", LM, ids=[case.id for case in LM])
def test_there_and_back(case: HandlerCase, plan: list[int]) -> None:
    cache = filled(case, plan)
    layer = layer_dict(cache)
    assert layer["class_name"] == type(cache).__name__
    for prototypes in (None, [case.make()]):
        (back,) = live_caches([layer], prototypes)
        assert type(back) is type(cache)
        check_same_layers([back], [cache])


def native(cache: Any) -> dict[str, Any]:
    """A layer as a caller takes it off the running mlx-lm."""
    return {"state": cache.state, "meta_state": getattr(cache, "meta_state", ""), "class_name": type(cache).__name__}


@pytest.mark.parametrize("plan", [p for p in PLANS.values() if p], ids=[k for k, p in PLANS.items() if p])
@pytest.mark.parametrize("case", LM, ids=[case.id for case in LM])
def test_the_state_of_this_line(case: HandlerCase, plan: list[int]) -> None:
    cache = filled(case, plan)
    (back,) = live_caches([native(cache)])
    check_same_layers([back], [cache])
    form = omlx_form(native(cache))
    assert str(form["state"]) == str(layer_dict(cache)["state"])
    check_same_layers(live_caches([form]), [cache])


@pytest.mark.parametrize(("name", "n"), [(name, n) for name in VLM for n in (3, 40) if n == 40 or "turbo" not in name])
def test_classes_of_mlx_vlm_behave_like_the_donor(name: str, n: int) -> None:
    case: Case = VLM[name]
    donor = case.donor(max(n, case.shortest))
    reference = copy.deepcopy(donor)
    own = case.make()
    (back,) = live_caches([layer_dict(donor)], [own])
    assert type(back) is type(donor)
    if case.settle is not None:
        case.settle(reference)
    (rebuilt,) = rebuild_layers([case.fresh()], through_parts(describe_layers([back]), n), n)
    seen = 0
    for (what, one), (_, other) in zip(case.play(rebuilt, n), case.play(reference, n), strict=True):
        assert same(one, other), what
        seen += isinstance(one, mx.array)
    assert seen >= 2


@pytest.mark.parametrize("name", ["buffered-16-4-7", "hybrid", "deepseek-v41"])
def test_classes_whose_state_does_not_say_all_are_refused(name: str) -> None:
    case = VLM_CASES[name]
    donor = case.make()
    for start, stop in ((0, 20), *((i, i + 1) for i in range(20, 34))):
        mx.eval([value for _, value in case.append(donor, start, stop) if isinstance(value, mx.array)])
    with pytest.raises(ValueError, match="layer 0"):
        live_caches([layer_dict(donor)], [case.make()])


def test_arrays_are_shared() -> None:
    keys, values = rows(5), -rows(5)
    (cache,) = live_caches([{"state": (keys, values), "meta_state": (99,), "class_name": "KVCache"}])
    assert cache.keys is keys
    assert cache.values is values
    assert cache.offset == 5  # not the meta state's 99
    form = layer_dict(cache)
    assert form["state"][0] is keys
    assert form == {"state": form["state"], "meta_state": (5,), "class_name": "KVCache", "cache_type": "KVCache"}


@pytest.mark.parametrize("meta", ["", (), (5,), ("5",), None, [5]])
def test_plain_rows_with_any_meta(meta: Any) -> None:
    layer = {"state": [rows(5), -rows(5)], "meta_state": meta, "class_name": "KVCache", "cache_type": "KVCache"}
    check_same_layers(live_caches([layer]), [plain(5)])


def test_padded_rows_count_to_the_offset_in_the_state() -> None:
    keys = mx.concatenate([rows(5), mx.zeros((1, 2, 251, 4))], axis=2)
    layer = {"state": (keys, -keys, 5), "class_name": "KVCache"}
    check_same_layers(live_caches([layer]), [plain(5)])
    assert omlx_form(layer)["state"][0].shape == (1, 2, 5, 4)


@pytest.mark.parametrize("keep", [0, 3])
@pytest.mark.parametrize(("count", "singles"), [(5, 0), (8, 0), (30, 0), (5, 9), (30, 3), (30, 20)])
def test_windows_in_their_ring_or_in_order(keep: int, count: int, singles: int) -> None:
    cache = window(count, keep=keep, singles=singles)
    held = min(cache.offset, cache.keys.shape[2])
    ring = {
        "state": (cache.keys[:, :, :held], cache.values[:, :, :held]),
        "meta_state": tuple(map(str, (keep, 8, cache.offset, cache._idx))),
        "class_name": "RotatingKVCache",
    }
    check_same_layers(live_caches([ring]), [cache])
    ordered = layer_dict(cache)
    assert ordered["state"][0].shape[2] == min(cache.offset, 8)
    assert ordered["meta_state"] == tuple(map(str, (keep, 8, cache.offset, min(cache.offset, 8))))
    check_same_layers(live_caches([ordered]), [cache])
    last = ordered["state"][0][:, :, -1:]
    assert same(mx.contiguous(last), rows(1, count + singles - 1))


def test_a_shared_index_beyond_the_rows_is_cut() -> None:
    layer = {"state": (rows(5), -rows(5)), "meta_state": ("0", "8", "5", "8"), "class_name": "RotatingKVCache"}
    check_same_layers(live_caches([layer]), [window(5)])


def test_a_window_without_meta_takes_the_settings_of_the_model() -> None:
    layer = {"state": (rows(5), -rows(5)), "class_name": "RotatingKVCache"}
    check_same_layers(live_caches([layer], [RotatingKVCache(8)]), [window(5)])
    full = {"state": (rows(8, 22), -rows(8, 22)), "class_name": "PrefillReadyRotatingKVCache", "token_count": 30}
    check_same_layers(live_caches([full], [RotatingKVCache(8)]), [window(30)])
    del full["token_count"]
    with pytest.raises(ValueError, match=r"layer 0 \(RotatingKVCache\): a full window without its offset"):
        live_caches([full], [RotatingKVCache(8)])
    with pytest.raises(ValueError, match="max_size is not known"):
        live_caches([layer])


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_whole_arrays_of_any_number(size: int) -> None:
    cache = states(*[(1, 3 + i, 4) for i in range(size)])
    for state in (cache.cache, tuple(cache.cache), (list(cache.cache), None, None)):
        for name in ("ArraysCache", "SizedArraysCache"):
            check_same_layers(live_caches([{"state": state, "class_name": name}]), [cache])


def test_arrays_that_are_not_set_take_the_models_size() -> None:
    (cache,) = live_caches([{"state": (), "class_name": "ArraysCache"}], [ArraysCache(2)])
    assert cache.cache == [None, None]
    (cache,) = live_caches([{"state": [None, rows(1)], "class_name": "ArraysCache"}])
    assert cache[0] is None
    assert same(cache[1], rows(1))


def test_lengths_of_a_running_request_stay_to_be_refused() -> None:
    cache = states((1, 3, 4))
    (back,) = live_caches([{"state": (cache.cache, None, mx.array([7])), "class_name": "ArraysCache"}])
    with pytest.raises(Unsupported, match="running batch"):
        describe_layers([back])


def test_lists_in_every_form() -> None:
    cache = CacheList(plain(30), window(30), states((1, 3, 4)))
    layer = layer_dict(cache)
    assert layer["meta_state"][0] == ["KVCache", "RotatingKVCache", "ArraysCache"]
    new = {
        "state": [(child["state"], child["class_name"]) for child in sub_layers(layer, None, "")],
        "class_name": "CacheList",
    }
    # As mlx-lm 0.32 has them, settings are in the states of windows.
    ring = cache.caches[1]
    new["state"][1] = ((ring.keys, ring.values, 30, 0, 8, ring._idx), "RotatingKVCache")
    by_names = {
        "state": layer["state"],
        "class_name": "CacheList",
        "sub_class_names": ["KVCache", "PrefillReadyRotatingKVCache", "SizedArraysCache"],
        "token_count": 30,
    }
    own = [CacheList(KVCache(), RotatingKVCache(8), ArraysCache(1))]
    bare = {"state": layer["state"], "class_name": "CacheList", "token_count": 30}
    for one, prototypes in ((layer, None), (layer, own), (new, None), (by_names, own), (bare, own)):
        (back,) = live_caches([one], prototypes)
        check_same_layers([back], [cache])
        assert [type(child) for child in back.caches] == [KVCache, RotatingKVCache, ArraysCache]
    with pytest.raises(ValueError, match=r"layer 0 \(CacheList\): 3 states without as many class names"):
        live_caches([bare])
    with pytest.raises(ValueError, match="3 caches, the model's own has 1"):
        live_caches([layer], [CacheList(KVCache())])


def test_chunks_behind_a_cut_front() -> None:
    cache = ChunkedKVCache(256)
    for start in (0, 200, 400):
        cache.maybe_trim_front()
        cache.update_and_fetch(rows(200, start), -rows(200, start))
    cache.maybe_trim_front()
    layer = layer_dict(cache)
    assert layer["token_count"] == 600
    if not OLD_CHUNKS:
        assert cache.start_position > 0
        check_same_layers(live_caches([layer]), [cache])
    del layer["token_count"]
    with pytest.raises(Unsupported, match="without a token_count"):
        live_caches([layer])


def test_quantised_rows_as_six_arrays() -> None:
    cache = QuantizedKVCache(32, 4)
    cache.update_and_fetch(rows(5, dim=64), -rows(5, dim=64))
    (keys, values), meta = layer_dict(cache)["state"], layer_dict(cache)["meta_state"]
    assert meta == ("5", "32", "4")
    for state in ((keys, values), [list(keys), list(values)], (*keys, *values)):
        # The offset of a shared meta state is not that of these rows.
        (back,) = live_caches([{"state": state, "meta_state": ("9", "32", "4"), "class_name": "QuantizedKVCache"}])
        check_same_layers([back], [cache])


def test_an_empty_joined_cache() -> None:
    (cache,) = live_caches([layer_dict(ConcatenateKVCache())])
    assert cache.keys is None
    assert cache.offset == 0


class FakeMiniMax:
    def __init__(self) -> None:
        self.kv_cache, self.index_keys, self.index_offset = SimpleNamespace(), None, 0


def test_minimax_is_found_where_it_was_put(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in of the model's module is used as it is, and has a plain cache of its own kind."""
    module = ModuleType("mlx_vlm.models.minimax_m3_vl.language")
    module.MiniMaxM3KVCache = FakeMiniMax  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    keys, values, index = rows(4), -rows(4), rows(4, heads=1)
    for state in ((keys, values, index), ((keys, values), index)):
        (cache,) = live_caches([{"state": state, "meta_state": (999,), "class_name": "MiniMaxM3KVCache"}])
        assert type(cache) is FakeMiniMax
        assert cache.kv_cache.state == (keys, values)
        assert cache.index_keys is index
        assert cache.index_offset == 4


BAD = {
    "no dict": ("nothing", "expected a dict with a state, got str"),
    "no name": ({"state": ()}, "class_name must be a string, got None"),
    "a name of no class": ({"state": (), "class_name": "NoSuchCache"}, "no cache class is named 'NoSuchCache'"),
    "a path": ({"state": (), "class_name": "nn.Module"}, "'nn.Module' is no name of a class"),
    "a name of no cache": ({"state": (), "class_name": "copy"}, "no cache class is named 'copy'"),
    "no state": ({"state": 7, "class_name": "KVCache"}, "expected a tuple or a list as its state, got int"),
    "one array": ({"state": (rows(3),), "class_name": "KVCache"}, "not enough values"),
    "no array": ({"state": ("k", "v"), "class_name": "KVCache"}, "expected arrays with rows, got str"),
    "half a pair": ({"state": (rows(3), None), "class_name": "KVCache"}, "expected arrays with rows, got NoneType"),
    "too much": ({"state": (rows(3), rows(3), 3, 3), "class_name": "KVCache"}, "got 4 elements"),
    "a count of None": ({"state": (rows(3), rows(3), None), "class_name": "KVCache"}, "offset must be a whole number"),
    "a negative count": ({"state": (), "class_name": "KVCache", "token_count": -1}, "token_count must be"),
    "half a meta": (
        {"state": (rows(3), rows(3)), "meta_state": ("0", "8"), "class_name": "RotatingKVCache"},
        "expected keep, max_size, offset and _idx",
    ),
    "a meta of words": (
        {"state": (rows(3), rows(3)), "meta_state": ("a", "b", "c", "d"), "class_name": "RotatingKVCache"},
        "max_size must be a whole number, got 'b'",
    ),
    "arrays of numbers": ({"state": [1, 2], "class_name": "ArraysCache"}, "expected a list of arrays"),
    "a list of nothing": ({"state": 5, "class_name": "CacheList"}, "expected a list of states, got int"),
    "codes alone": (
        {"state": (rows(3), rows(3)), "meta_state": ("3", "32", "4"), "class_name": "QuantizedKVCache"},
        "expected codes, scales and biases",
    ),
    "quantised without settings": ({"state": (rows(3), rows(3)), "class_name": "QuantizedKVCache"}, "not known"),
    "chunks without settings": ({"state": (rows(3), rows(3)), "class_name": "ChunkedKVCache"}, "chunk_size is not"),
    "a full pool buffer": (
        {"state": (rows(4)[0], rows(4)[0], None), "meta_state": 4, "class_name": "PoolingCache"},
        "4 rows are pending of a ratio of 4",
    ),
    "no codes": (
        {"state": (rows(3), rows(3)), "meta_state": ("3", "4", "0"), "class_name": "TurboQuantKVCache"},
        "not a TurboQuant state: array",
    ),
    "codecs of words": (
        {"state": (rows(3), rows(3)), "class_name": "TurboQuantKVCache", "codecs": "mse"},
        "codecs must be a dict",
    ),
}


@pytest.mark.parametrize(("layer", "message"), BAD.values(), ids=BAD.keys())
def test_what_is_not_understood_is_named(layer: Any, message: str) -> None:
    with pytest.raises(ValueError, match="layer 1") as caught:
        live_caches([layer_dict(plain(3)), layer])
    assert message in str(caught.value)
    if isinstance(layer, dict):
        assert omlx_form(layer) == layer


@pytest.mark.parametrize("layers", [None, "layers", {"state": ()}, 3])
def test_something_that_is_no_list_of_layers(layers: Any) -> None:
    with pytest.raises(ValueError, match="expected a list with one dict per layer"):
        live_caches(layers)


def test_as_many_layers_as_the_model_has() -> None:
    with pytest.raises(ValueError, match="1 layers, the model has 2"):
        live_caches([layer_dict(plain(3))], [KVCache(), KVCache()])


def test_a_prototype_of_another_class_is_not_asked() -> None:
    """A model's own plain cache says nothing about the quantised rows of a request."""
    cache = QuantizedKVCache(32, 4)
    cache.update_and_fetch(rows(5, dim=64), rows(5, dim=64))
    (back,) = live_caches([layer_dict(cache)], [KVCache()])
    assert type(back) is QuantizedKVCache


def test_an_object_without_a_state_has_no_layer_dict() -> None:
    with pytest.raises(ValueError, match="object has no state to hand over"):
        layer_dict(object())


@pytest.mark.parametrize("case", LM[:6] + LM[-4:-3], ids=lambda case: case.id)
def test_standing_earlier(case: HandlerCase) -> None:
    cache, expected = filled(case, [40]), filled(case, [25])
    before = common_offset(describe_layers([cache]))
    shorter = with_offset(cache, 25)
    check_same_layers([shorter], [expected])
    assert common_offset(describe_layers([cache])) == before == 40
    assert with_offset(cache, 40) is cache


def test_standing_earlier_in_classes_of_mlx_vlm() -> None:
    for name in ("minimax", "minimax-dense", "turbo-4", "simple", "kv"):
        case = VLM_CASES[name]
        shorter = with_offset(case.donor(40), 25)
        mx.eval([one for _, one in case.append(case.make(), 0, 25) if isinstance(one, mx.array)])
        if name == "simple":
            # It has exactly its rows: what was trimmed cannot be told from rows that replaced others.
            with pytest.raises(ValueError, match="cache_length 25 but 40 rows"):
                describe_layers([shorter])
            continue
        assert common_offset(describe_layers([shorter])) == 25
        assert common_offset(describe_layers(live_caches([layer_dict(shorter)]))) == 25


def test_where_no_cache_can_stand() -> None:
    with pytest.raises(Unsupported, match="KVCache stands at 5, asked for 6"):
        with_offset(plain(5), 6)
    with pytest.raises(Unsupported, match="RotatingKVCache: rows before token 29 are gone"):
        with_offset(window(27, singles=3), 29)
    with pytest.raises(ValueError, match="must not be negative"):
        with_offset(plain(5), -1)
    both = CacheList(plain(30), window(27, singles=3))
    with pytest.raises(Unsupported, match="rows before token 29 are gone"):
        with_offset(both, 29)
    assert with_offset(both, 30) is both


def test_what_else_stands_at_a_token_is_not_guessed() -> None:
    donor = VLM_CASES["qsa"].donor(20)
    assert with_offset(donor, 20) is donor
    with pytest.raises(Unsupported, match="QSAKVCache stands at 20, asked for 15"):
        with_offset(donor, 15)


def test_windows_that_dropped_nothing_and_states_stand_earlier() -> None:
    check_same_layers([with_offset(window(6), 4)], [window(4)])
    check_same_layers([with_offset(window(30), 29)], [window(29)])
    cache = states((1, 2, 3))
    assert with_offset(SizedArraysCache(cache, 9), 4) is cache
    empty = KVCache()
    assert with_offset(empty, 7) is empty


def test_restored_caches_are_dressed() -> None:
    inside = CacheList(window(30), states((1, 2, 3)), plain(30))
    given = [plain(30), window(30), states((1, 2, 3)), inside]
    dressed = wrap_restored(given, 30)
    assert dressed[0] is given[0]
    assert type(dressed[1]) is PrefillReadyRotatingKVCache
    assert dressed[1].keys is given[1].keys
    assert type(dressed[2]) is SizedArraysCache
    assert dressed[2].size() == 30
    assert [type(child) for child in dressed[3].caches] == [PrefillReadyRotatingKVCache, ArraysCache, KVCache]
    assert [layer_dict(cache)["cache_type"] for cache in dressed] == [
        "KVCache",
        "RotatingKVCache",
        "ArraysCache",
        "CacheList",
    ]
    # It is the count that it was restored at, not the one that it stands at since.
    assert "token_count" not in layer_dict(dressed[2])
    check_same_layers(live_caches([layer_dict(cache) for cache in dressed]), given)
    check_same_layers([undressed(cache) for cache in dressed], given)
    check_same_layers([undressed(cache) for cache in wrap_restored(dressed, 30)], given)
    own = VLM_CASES["rotating-16-0"].donor(20)
    assert wrap_restored([own], 20) == [own]


def test_mlx_vlm_is_imported_for_its_own_classes_only() -> None:
    program = (
        "import sys, mlx.core as mx\n"
        "import prefixcache.hybrid_cache\n"
        "assert not {'mlx_lm', 'mlx_vlm', 'transformers'} & set(sys.modules)\n"
        "from prefixcache._omlx.layer_dicts import live_caches\n"
        "live_caches([{'state': (mx.zeros((1, 1, 2, 4)),) * 2, 'class_name': 'KVCache'}])\n"
        "assert 'mlx_lm' in sys.modules and 'mlx_vlm' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env=child_environment(), timeout=120)
