"""mlx-vlm's cache classes: a rebuilt cache is indistinguishable from the donor by anything a model can do with it."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import pytest
from handler_cases_vlm import CASES, Case, arrays_of
from parts import same, through_parts

from prefixcache._layer_state import (
    BOUNDARY,
    LayerState,
    Reach,
    Slot,
    decode_structure,
    encode_structure,
    flatten,
    unflatten,
)
from prefixcache._registry import common_offset, describe_layers, handler_for, rebuild_layers, registered
from prefixcache.errors import Unsupported

# Windows of 16 and 300, groups of 4 and 128, chunks of 32 and buffers that grow by 256: below, at and above.
LENGTHS = {str(n): n for n in (1, 15, 16, 17, 130, 256)}
STEPS = {"single": (1,) * 9, "sevens": (7,) * 3, "long": (270, 1)}

QSA = "mlx_vlm.QSAKVCache"

# Rows that are encoded take far longer than others, and have no windows: in the short form they have the ends of each
# grid, and those that are made like two others have nothing else.
ENCODED = {name for name, case in CASES.items() if "Quant" in case.type_name and case.type_name[:8] == "mlx_vlm."}
LIKE_OTHERS = {"turbo-3.5", "turbo-split-prod", "hybrid-split"}


def grid(name: str, values: dict[str, Any], ends: set[str]) -> Any:
    """Every case with every value; of encoded rows only ``ends`` in the short form."""
    points = [
        pytest.param(
            case, value, id=f"{key}-{at}", marks=[pytest.mark.long] if key in ENCODED and at not in ends else []
        )
        for key, case in CASES.items()
        for at, value in values.items()
    ]
    return pytest.mark.parametrize(("case", name), points)


def most(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.long] if name in LIKE_OTHERS else []) for name in names]


@pytest.fixture(params=most(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def rebuild(case: Case, donor: Any, n: int, spare: int = 0) -> Any:
    (cache,) = rebuild_layers([case.fresh()], through_parts(describe_layers([donor]), n, spare), n)
    return cache


def check_same_play(case: Case, cache: Any, reference: Any, n: int, steps: tuple[int, ...] = ()) -> None:
    plays = [case.play(one, n, steps) if steps else case.play(one, n) for one in (cache, reference)]
    seen = 0
    for (what, found), (_, expected) in zip(*plays, strict=True):
        assert same(found, expected), what
        seen += isinstance(found, mx.array)
    assert seen >= 2


@grid("n", LENGTHS, ends={"1", "256"})
def test_rebuilt_behaves_like_the_donor(case: Case, n: int) -> None:
    n = max(n, case.shortest)
    donor = case.donor(n)
    reference = copy.deepcopy(donor)
    states = describe_layers([donor])
    assert [state.type_name for state in states] == [case.type_name]
    assert common_offset(states) == (n if case.counts else None)
    rebuilt = rebuild(case, donor, n, spare=n % 3 * 150)
    assert type(rebuilt) is type(donor)
    assert {name for name in vars(donor) if not name.startswith("_qwen3_5_")} == vars(rebuilt).keys()
    case.settle(reference)
    check_same_play(case, rebuilt, reference, n)


@grid("steps", STEPS, ends={"long"})
def test_in_other_steps(case: Case, steps: tuple[int, ...]) -> None:
    donor = case.donor(20, step=max(1, case.shortest))
    reference = copy.deepcopy(donor)
    case.settle(reference)
    check_same_play(case, rebuild(case, donor, 20, spare=9), reference, 20, steps)


def reaches(case: Case) -> frozenset[Reach]:
    return handler_for(case.fresh()).reaches(case.fresh(), "cache")


@pytest.mark.parametrize("name", most(name for name, case in CASES.items() if BOUNDARY not in reaches(case)))
def test_rows_before_the_end_of_the_donor(name: str) -> None:
    """Rows depend on their token and position alone, so a donor that stops at n tells what stands there."""
    case, n = CASES[name], 371
    reference = case.donor(n)
    case.settle(reference)
    check_same_play(case, rebuild(case, case.donor(400), n, spare=20), reference, n)


def test_every_class_is_covered() -> None:
    known = {key: handler.type_name for key, handler in registered().items() if key[0].startswith("mlx_vlm")}
    kinds = {case.type_name: type(case.make()) for case in CASES.values()}
    assert {(kind.__module__, kind.__qualname__): name for name, kind in kinds.items()} == known


def test_reaches_are_known_before_the_first_token(case: Case) -> None:
    found = {slot.reach for _, slot in flatten(describe_layers([case.donor(40)]))}
    assert found == reaches(case)


def test_donor_and_prototype_stay_as_they_are(case: Case) -> None:
    donor, prototype = case.donor(60), case.fresh()
    before, identities = copy.deepcopy(donor), [id(array) for array in arrays_of(donor)]
    fresh = copy.deepcopy(prototype)
    (rebuilt,) = rebuild_layers([prototype], through_parts(describe_layers([donor]), 60, 9), 60)
    list(case.play(rebuilt, 60))
    assert [id(array) for array in arrays_of(donor)] == identities
    assert all(same(a, b) for a, b in zip(arrays_of(donor), arrays_of(before), strict=True))
    assert arrays_of(prototype) == []
    check_same_play(case, prototype, fresh, 0)


def test_rebuilt_of_rebuilt(case: Case) -> None:
    donor = case.donor(50)
    once = rebuild(case, donor, 50, 40)
    again = rebuild(case, donor, 50, 5)
    check_same_play(case, rebuild(case, once, 50, 5), again, 50)


def test_rebuilt_owns_the_arrays_it_was_given(case: Case) -> None:
    """A copy here would cost a second pass over the bytes and a second owner would copy again at the next append."""
    states = through_parts(describe_layers([case.donor(10)]), 10)
    (rebuilt,) = rebuild_layers([case.fresh()], states, 10)
    owned = {id(array) for array in arrays_of(rebuilt)}
    given = {id(slot.data) for name, slot in flatten(states) if "index_" not in name or case.type_name != QSA}
    assert given <= owned


def test_structure_does_not_change_with_length(case: Case) -> None:
    texts = {encode_structure(describe_layers([case.donor(n)])) for n in (130, 170)}
    assert len(texts) == 1


def test_empty_cache(case: Case) -> None:
    states = describe_layers([case.make()])
    assert flatten(states) == []
    assert common_offset(states) == (0 if case.counts else None)
    restored = unflatten(decode_structure(encode_structure(states)), {}, 0)
    (rebuilt,) = rebuild_layers([case.fresh()], restored, 0)
    assert type(rebuilt) is type(case.make())
    check_same_play(case, rebuilt, case.make(), 0)


def test_too_few_rows_or_other_tokens(case: Case) -> None:
    states = through_parts(describe_layers([case.donor(10)]), 10)
    if not case.counts or case.type_name in ("mlx_vlm.Z1TCache", "mlx_vlm.DeepseekV41Cache"):
        # Their arrays have one shape at every length.
        assert {slot.seq_axis for _, slot in flatten(states)} == {None}
        return
    with pytest.raises(ValueError, match="layer 0 "):
        rebuild_layers([case.fresh()], states, 10 + 128)


@pytest.mark.parametrize("change", ["unknown", "missing"])
def test_other_fields_are_refused(case: Case, change: str) -> None:
    donor = case.donor(10)
    if change == "unknown":
        donor.rotation = 3
    else:
        del vars(donor)[next(name for name in vars(donor) if name[0] != "_")]
    with pytest.raises(Unsupported, match="layer 0 ") as caught:
        describe_layers([donor])
    assert caught.value.reason == "unknown_field"


def test_stored_slots_of_another_shape(case: Case) -> None:
    (state,) = through_parts(describe_layers([case.donor(130)]), 130)
    if state.children or any(slot.reach == BOUNDARY for slot in state.slots):
        changed = LayerState(state.type_name, (*state.slots, Slot("other", mx.zeros((1,)), None, BOUNDARY)), state.meta)
    else:
        changed = LayerState(state.type_name, state.slots[1:], state.meta, offset=130)
    with pytest.raises(Unsupported, match="layer 0 ") as caught:
        rebuild_layers([case.fresh()], [changed], 130)
    assert caught.value.reason == "structure_mismatch"
