"""Plain data and large texts come as they were given: types, identities and circles."""

import enum
from collections import OrderedDict, namedtuple
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from integration_helpers import get

import conveyor

#: Bytes. From here on a text or bytes inside of something lies beside the pickle.
LARGE = 1 << 18

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.text(st.characters(categories=["Cs"]), min_size=1, max_size=3)  # lone surrogates
    | st.binary()
    | st.sampled_from(["key", "value", "", "é" * 300, b"b" * 300, 127, 128, -129, 1 << 31, 1 << 63])
)
KEYS = (
    st.text(max_size=3) | st.integers() | st.tuples(st.integers(), st.text(max_size=2)) | st.none()
)


def containers(parts):
    return (
        st.lists(parts, max_size=5)
        | st.lists(parts, max_size=5).map(tuple)
        | st.dictionaries(KEYS, parts, max_size=5)
    )


@st.composite
def tangled(draw):
    """Plain data in which some parts are there twice, and some are in themselves."""
    value = [draw(st.recursive(SCALARS, containers, max_leaves=20)) for _ in range(3)]
    found = [value, *value]
    for part in found:
        found.extend(
            part.values() if type(part) is dict else part if type(part) in (list, tuple) else ()
        )
    for _ in range(draw(st.integers(0, 3))):
        target = draw(st.sampled_from([part for part in found if type(part) in (list, dict)]))
        part = draw(st.sampled_from(found))
        if type(target) is list:
            target.append(part)
        else:
            target["again"] = part
    return value


def shape(value, seen=None):
    """Types, values and which containers are the same object; without going round in circles."""
    seen = {} if seen is None else seen
    kind = type(value)
    if kind not in (list, tuple, dict) or value == ():
        return kind, value
    if id(value) in seen:
        return "again", seen[id(value)]
    seen[id(value)] = len(seen)
    parts = [p for pair in value.items() for p in pair] if kind is dict else value
    return kind, [shape(part, seen) for part in parts]


@given(value=tangled())
@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_what_was_put_comes_back_as_it_was(local, value):
    assert shape(get(conveyor.put(value))) == shape(value)


@conveyor.remote
class Actor:
    def same(self, *args, **kwargs):
        return args, kwargs

    def shapes(self, *args, **kwargs):
        return repr(shape([args, kwargs]))

    def items(self, *values):
        yield from values


class Color(enum.IntEnum):
    RED = 1


class Text(str):
    pass


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    "odd",
    [Color.RED, Text("a"), Point(1, 2), OrderedDict(a=1), {1, 2}, 1 << 80, "\ud800", True, ()],
    ids=repr,
)
def test_what_is_not_plain_keeps_its_type(engine, odd):
    actor = Actor.remote()
    (args, kwargs) = get(actor.same.remote([odd, "plain"], {"key": odd}, by_name=(odd, [odd])))
    for one in (args[0][0], args[1]["key"], kwargs["by_name"][0], kwargs["by_name"][1][0]):
        assert type(one) is type(odd)
        assert one == odd


def test_two_arguments_that_are_one_object_arrive_as_one(local):
    actor, shared = Actor.remote(), [1]
    (a, b, both), kwargs = get(
        actor.same.remote(shared, shared, [shared, {"it": shared}], c=shared)
    )
    assert a is b is both[0] is both[1]["it"] is kwargs["c"]


def test_what_is_very_deep_is_an_error_or_comes(local):
    value = []
    for _ in range(90):
        value = [value]
    assert get(conveyor.put(value)) == value
    for _ in range(100_000):
        value = [value]
    with pytest.raises(conveyor.exceptions.SerializationError, match="nested too deeply"):
        conveyor.put(value)
    while value:  # its own end would be too deep as well
        value = value[0]


def test_a_value_is_what_it_was_when_it_was_given(engine):
    actor, given_ = Actor.remote(), {"a": [1], "b": "text"}
    ref = actor.same.remote(given_)
    kept = conveyor.put(given_)
    given_["a"].append(2)
    given_["c"] = 3
    assert get(ref)[0][0] == get(kept) == {"a": [1], "b": "text"}
    get(kept)["a"].append(5)
    assert get(kept)["a"] == [1]


def large():
    array = np.arange(LARGE)
    return {
        "bytes": b"b" * LARGE,
        "text": "a" * LARGE,
        "wide": "é" * LARGE,
        "lone": "\ud800" * LARGE,
        "bytearray": bytearray(b"c" * LARGE),
        "array": array,
        "in a row": [b"d" * (LARGE + 1), array[::2], "e" * (LARGE + 2), array, b"f" * (1 << 16)],
    }


def check_large(value):
    expected = large()
    assert list(value) == list(expected)
    for name in ("bytes", "text", "wide", "lone", "bytearray"):
        assert type(value[name]) is type(expected[name])
        assert value[name] == expected[name]
    assert (value["array"] == expected["array"]).all()
    for one, other in zip(value["in a row"], expected["in a row"], strict=True):
        assert type(one) is type(other)
        assert np.array_equal(one, other)
    assert value["in a row"][3] is value["array"]
    value["bytearray"].append(1)  # it is nobody else's


def test_large_texts_and_bytes_inside_of_values(engine):
    actor, value = Actor.remote(), large()
    value["array"] = value["in a row"][3]
    (back,), _ = get(actor.same.remote(value))
    check_large(back)
    check_large(get(conveyor.put(value)))
    for item in actor.items.remote(value, value):
        check_large(item)
    check_large(value)


def test_a_large_one_that_is_there_twice_is_one(local):
    text = b"x" * LARGE
    back = get(conveyor.put([text, text, (text,)]))
    assert back[0] is back[1] is back[2][0]


def test_a_bytearray_may_grow_once_it_was_given(engine):
    actor, value = Actor.remote(), bytearray(b"x" * LARGE)
    ref = actor.same.remote([value])
    value.extend(b"more")
    assert get(ref)[0][0][0] == b"x" * LARGE


@conveyor.remote
class Maker:
    def filled(self, number):
        return bytes([number]) * (32 << 20)

    @conveyor.method(tensor_transport="auto")
    def texts(self):
        self.mine = bytearray(b"x" * LARGE)
        return {"text": "t" * LARGE, "bytes": b"b" * LARGE, "mine": self.mine}

    def grow(self):
        self.mine.extend(b"more")


def test_large_results_that_threads_get_at_once_are_all_there(local):
    """Copying one lets other threads run, which look for theirs meanwhile."""
    maker = Maker.remote()
    for _ in range(4):
        refs = [maker.filled.remote(number) for number in range(3)]
        conveyor.wait(refs, num_returns=3)
        with ThreadPoolExecutor(3) as pool:
            for number, value in enumerate(pool.map(get, refs)):
                assert value == bytes([number]) * (32 << 20)


def test_texts_and_bytes_do_not_stay_with_their_maker(local):
    maker = Maker.remote()
    ref = maker.texts.remote()
    conveyor.wait([ref])
    get(maker.grow.remote())  # nobody else has a hand on it
    conveyor.kill(maker)
    value = get(ref)
    assert value == {"text": "t" * LARGE, "bytes": b"b" * LARGE, "mine": b"x" * LARGE}
