"""Dictionaries whose values others keep alive."""

import gc
import weakref

import pytest

from conveyor.weak import WeakValues


class Value:
    pass


@pytest.fixture
def collected_by_hand():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_who_asks_while_garbage_is_collected_gets_a_living_value(collected_by_hand):
    """The collector ends every reference to its garbage before anybody hears of it, so for a moment the
    dictionary still has an entry of what is gone."""
    values: WeakValues[str, Value] = WeakValues()
    new, found = Value(), []

    def gone(_):
        found.append((values.get("key"), values.setdefault("key", new)))

    dead = Value()
    dead.itself = dead
    heard = [weakref.ref(dead, gone)]  # one of the two hears of it before the dictionary does
    values["key"] = dead
    heard.append(weakref.ref(dead, gone))
    del dead
    gc.collect()
    assert len(heard) == len(found) == 2
    assert found[0] == (None, new)
    assert found[1][1] is new
    assert values["key"] is new
    assert len(values) == 1


def test_an_entry_that_another_has_made_meanwhile_stays():
    values: WeakValues[str, Value] = WeakValues()
    first, second = Value(), Value()
    assert values.setdefault("key", first) is first
    assert values.setdefault("key", second) is first
    del first
    assert values.get("key") is None
    assert values.setdefault("key", second) is second
