"""What the front doors of one store remember of one another."""

from __future__ import annotations

import gc
import weakref

from prefixcache._doors import Doors


class Thing:
    """Stands for a door or a model."""


def test_the_first_of_equal_keys_is_the_one() -> None:
    first, second, third = Thing(), Thing(), Thing()
    doors = Doors("a", first)
    assert doors.the_one("a", second) is first
    assert doors.the_one("b", second) is second
    assert doors.the_one("b", third) is second


def test_the_first_door_is_not_kept_alive() -> None:
    """A cache that its owner drops without a word is closed at once."""
    first = Thing()
    gone = weakref.ref(first)
    doors = Doors("a", first)
    del first
    assert gone() is None
    other = Thing()
    assert doors.the_one("a", other) is other


def test_only_some_doors_are_remembered_those_in_use_among_them() -> None:
    first = Thing()
    doors = Doors("a", first)
    old, often = doors.the_one("old", Thing()), doors.the_one("often", Thing())
    for number in range(100):
        doors.the_one(str(number), Thing())
        assert doors.the_one("often", Thing()) is often
    assert doors.the_one("old", Thing()) is not old
    assert doors.the_one("a", Thing()) is first


def test_a_model_is_known_by_its_identity_while_it_lives() -> None:
    first, door = Thing(), Thing()
    doors = Doors("a", first)
    models = [Thing() for _ in range(50)]
    for model in models:
        doors.remember(model, door)
    assert all(doors.of_model(model) is door for model in models)
    assert doors.of_model(Thing()) is None
    del model
    gone = weakref.ref(models.pop())
    gc.collect()
    assert gone() is None
    # Objects that may have got the numbers of those that are gone.
    del models
    assert [doors.of_model(thing) for thing in [Thing() for _ in range(100)]] == [None] * 100
