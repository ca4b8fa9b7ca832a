"""Parts of values that have stayed on their actor, and values that are fetched into memory that is there."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from integration_helpers import WAIT, get

import conveyor
from conveyor.dag import InputNode, MultiOutputNode

torch = pytest.importorskip("torch")
PRELOAD = ["torch"]


def layers():
    return {
        "layers": [
            {
                "w": torch.arange(1e6).reshape(1000, 1000),
                "odd": np.array([1, 2, 3], "u1"),
                "b": torch.zeros(8),
                "name": "first",
            },
            {"w": torch.arange(1000.0).repeat(1000, 1).T.contiguous(), "b": torch.ones(8)},
        ],
        "table": np.arange(1e6).reshape(1000, 1000),
        "step": 7,
    }


def views():
    whole = np.arange(24).reshape(4, 6)
    return {"whole": whole, "rows": whole[1:3], "columns": whole[:, 1:3], "turned": whole.T}


class Total:
    """It is made of what is in an array when it is loaded."""

    def __init__(self, array):
        self.array = array

    def __setstate__(self, state):
        self.value = int(state["array"].sum())


@conveyor.remote
class Holder:
    @conveyor.method(tensor_transport="auto")
    def layers(self):
        return layers()

    @conveyor.method(tensor_transport="auto")
    def views(self):
        return views()

    @conveyor.method(tensor_transport="auto")
    def looking(self):
        array = np.arange(10)
        return {"array": array, "sum": Total(array), "even": array[::2]}

    @conveyor.method(tensor_transport="auto")
    def array(self, shape, dtype="int32", order="C"):
        return np.arange(np.prod(shape, dtype=int)).astype(dtype).reshape(shape, order=order)

    @conveyor.method(tensor_transport="auto")
    def tensor(self, shape):
        import torch

        return torch.arange(np.prod(shape, dtype=int)).reshape(shape)

    @conveyor.method(tensor_transport="auto")
    def named(self, key):
        return {"a": {key: np.ones(100), "x": np.zeros(1_000_000)}}

    @conveyor.method(tensor_transport="auto")
    def ones(self, count):
        import torch

        return [torch.ones(6) for _ in range(count)] if count > 1 else torch.ones(6)

    @conveyor.method(tensor_transport="auto")
    def nested(self):
        import torch

        return {"a": torch.ones(2, 3), "b": [np.arange(4), torch.zeros(0), "text"]}

    @conveyor.method(tensor_transport="auto")
    def aliases(self):
        import torch

        whole = torch.arange(6.0)
        return whole, whole[2:4]

    @conveyor.method(tensor_transport="auto")
    def tied(self, pattern):
        import torch

        tensors = {name: torch.full((6,), float(i)) for i, name in enumerate("abc")}
        return [tensors[name].detach() for name in pattern]

    @conveyor.method(tensor_transport="auto", num_returns=2)
    def two(self):
        return np.arange(12.0).reshape(3, 4), {"a": np.ones(3)}

    def plain(self):
        return np.arange(6.0)

    def items(self):
        yield np.ones(3)

    def total(self, value):
        return float(value.sum())

    def pass_on(self, value):
        return value


@pytest.fixture(scope="module")
def holder(session):
    made = Holder.remote()
    yield made
    conveyor.kill(made)


def indices(shape):
    """What arrays of that shape can be indexed with."""
    one = [
        st.integers(-n, n - 1) | st.slices(n) if n else st.slices(n)  # noqa: RUF100
        for n in shape
    ]
    return st.integers(0, len(shape)).flatmap(lambda n: st.tuples(*one[:n]))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_part_is_what_indexing_gives(holder, data):
    shape = tuple(data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4)))
    index = data.draw(indices(shape))
    whole = np.arange(np.prod(shape, dtype=int)).astype("int32").reshape(shape)
    ref = holder.array.remote(shape)
    got = get(ref[index])
    expected = whole[index]
    assert np.array_equal(got, expected)
    assert np.shape(got) == expected.shape
    assert get(holder.total.remote(ref[index])) == expected.sum()


def test_only_the_part_is_fetched(holder, monkeypatch):
    from conveyor.direct import fetching

    sizes = []
    room_for = fetching._allocate
    monkeypatch.setattr(fetching, "_allocate", lambda size: sizes.append(size) or room_for(size))
    ref = holder.tensor.remote((1000, 1000))
    assert get(ref[10:20]).tolist() == np.arange(10_000, 20_000).reshape(10, 1000).tolist()
    assert get(ref[3, 5:7]).tolist() == [3005, 3006]
    assert get(ref[:2, :2]).tolist() == [[0, 1], [1000, 1001]]
    assert max(sizes) == 80_000


def test_parts_of_what_travels_as_any_other_value(holder):
    assert get(holder.plain.remote()[1:3]).tolist() == [1.0, 2.0]
    assert get(holder.nested.remote()["b"])[2] == "text"
    assert get(holder.array.remote((4, 3), order="F")[1:3]).tolist() == [[1, 5, 9], [2, 6, 10]]
    mine = conveyor.put(np.arange(4), tensor_transport="auto")
    assert conveyor.get(mine[1:]).tolist() == [1, 2, 3]


def test_parts_that_there_are_not(holder):
    ref = holder.array.remote((3, 4))
    for index in (3, (0, 4), (-4,), (0, 0, 0)):
        with pytest.raises(IndexError):
            get(ref[index])
    with pytest.raises(TypeError, match="not iterable"):
        list(ref)


def test_into_an_array_and_a_tensor(holder):
    ref = holder.array.remote((3, 4), "float32")
    array = np.zeros((3, 4), "float32")
    assert conveyor.get(ref, into=array) is array
    assert array.tolist() == np.arange(12.0).reshape(3, 4).tolist()
    tensor = torch.zeros(3, 4)
    assert conveyor.get(ref, into=tensor) is tensor
    assert tensor.sum() == 66
    big = torch.zeros(5, 3, 4)
    conveyor.get(ref, into=big[2])
    assert big.sum() == 66
    assert big[2].sum() == 66


def test_into_several(holder):
    ref = holder.nested.remote()
    into = [torch.zeros(2, 3), np.zeros(4, int), torch.ones(0)]
    value = conveyor.get(ref, into=into)
    assert value["b"][2] == "text"
    assert into[0].sum() == 6
    assert into[1].tolist() == [0, 1, 2, 3]
    value["a"] += 1  # it lies there
    assert into[0].sum() == 12


def test_a_gradient_that_needs_what_was_there_raises(holder):
    for count in (1, 2):
        weights = [torch.ones(6, requires_grad=True) for _ in range(count)]
        loss = sum((weight * weight).sum() for weight in weights)
        conveyor.get(holder.ones.remote(count), into=weights if count > 1 else weights[0])
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    with torch.inference_mode():
        target = torch.zeros(6)
        conveyor.get(holder.array.remote((6,), "float32"), into=target)
        assert target.sum() == 15


def test_into_what_parts_of_the_value_share(holder):
    into = [torch.zeros(6), torch.zeros(2)]
    conveyor.get(holder.aliases.remote(), into=into)
    assert [one.tolist() for one in into] == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [2.0, 3.0]]


def test_tied_weights_are_fetched_to_where_they_are_tied(holder):
    shared, other = torch.zeros(6), torch.zeros(6)
    value = conveyor.get(holder.tied.remote("aba"), into=[shared, other, shared.detach()])
    assert shared.tolist() == [0.0] * 6
    assert other.tolist() == [1.0] * 6
    value[0] += 5  # it lies there, as does the one that is tied to it
    assert shared.tolist() == value[2].tolist() == [5.0] * 6


def test_weights_that_are_tied_where_the_targets_are_not(holder):
    targets = [torch.full((6,), 9.0) for _ in range(3)]
    conveyor.get(holder.tied.remote("aab"), into=targets)
    assert [target.tolist() for target in targets] == [[x] * 6 for x in (0.0, 0.0, 1.0)]


@pytest.mark.parametrize(("value", "into"), [("aba", "aab"), ("abc", "aab")])
def test_a_target_that_is_to_take_two_different_parts(holder, value, into):
    targets = {name: torch.full((6,), 9.0) for name in "abc"}
    with pytest.raises(ValueError, match=r"one target is to take both \[0\] and \[1\]"):
        conveyor.get(holder.tied.remote(value), into=[targets[name] for name in into])
    assert all(target.tolist() == [9.0] * 6 for target in targets.values())  # nothing was written


@pytest.mark.parametrize("make", [np.zeros, torch.zeros], ids=["numpy", "torch"])
def test_targets_that_overlap_are_refused(holder, make):
    buffer = make(14)
    value = {"a": np.ones(6), "b": np.ones(3)}
    if make is torch.zeros:
        value = {name: torch.ones(one.shape) for name, one in value.items()}
    is_remote = holder.pass_on.options(tensor_transport="auto", snapshot=True).remote(value)
    for ref in (is_remote, conveyor.put(value, tensor_transport="auto"), conveyor.put(value)):
        for into in ({"a": buffer[:6], "b": buffer[4:7]}, [buffer[3:9], buffer[6:9]]):
            with pytest.raises(
                ValueError, match=r"same memory is to take both \['a'\] and \['b'\]"
            ):
                conveyor.get(ref, into=into)
    assert not buffer.any()
    conveyor.get(is_remote, into=[buffer[:6], buffer[6:9]])
    assert buffer.sum() == 9


def test_targets_may_overlap_as_the_value_does(holder):
    buffer, shared = torch.zeros(8), torch.arange(6.0)
    here = conveyor.put({"a": shared, "b": shared[4:]}, tensor_transport="auto")
    for ref in (here, holder.pass_on.options(tensor_transport="auto").remote(here)):
        buffer.zero_()
        conveyor.get(ref, into={"a": buffer[:6], "b": buffer[4:6]})
        assert buffer.tolist() == [*range(6), 0, 0]
        with pytest.raises(ValueError, match="same memory"):
            conveyor.get(ref, into=[buffer[:6], buffer[3:5]])
    square = conveyor.put(
        [one := torch.arange(4.0).reshape(2, 2), one.t()], tensor_transport="auto"
    )
    target = torch.zeros(2, 2)
    with pytest.raises(ValueError, match="one target is to take both"):
        conveyor.get(square, into=[target, target])


def test_what_several_references_give_is_not_received_into_the_same_memory(holder):
    buffer = np.zeros(9)
    ref, other = [conveyor.put(np.full(6, x), tensor_transport="auto") for x in (1.0, 2.0)]
    with pytest.raises(ValueError, match="both the value of reference 0 and that of reference 1"):
        conveyor.get([ref, other], into=[buffer[:6], buffer[3:]])
    assert not buffer.any()
    conveyor.get([ref, ref], into=[buffer[:6], buffer[:6]])
    assert buffer.sum() == 6


def test_into_from_a_frame_and_from_this_process(holder):
    array = np.zeros(6)
    assert conveyor.get(holder.plain.remote(), into=array).tolist() == [0, 1, 2, 3, 4, 5]
    mine = conveyor.put(np.ones(6), tensor_transport="auto")
    conveyor.get(mine, into=array)
    assert array.tolist() == [1.0] * 6


@pytest.mark.parametrize(
    ("into", "words"),
    [
        (np.zeros(12, "float32"), r"of float32 and shape \[3, 4\], and what is to take it"),
        (np.zeros((3, 4), "int32"), "of int32"),
        (np.zeros((3, 4)), "of float64"),
        ([np.zeros((3, 4), "float32")] * 2, "has 1 tensors and arrays, and there are 2"),
        (np.zeros((4, 3), "float32").T, "must be contiguous"),
    ],
)
def test_what_does_not_fit_is_refused_and_left_as_it_is(holder, into, words):
    ref = holder.array.remote((3, 4), "float32")
    with pytest.raises(ValueError, match=words):
        conveyor.get(ref, into=into)
    assert all((one == 0).all() for one in (into if isinstance(into, list) else [into]))


def test_what_nothing_can_be_read_into(holder):
    ref, target = holder.array.remote((3,)), np.zeros(3, "int32")
    for into, words in (
        (5, "not a value of type int$"),
        ("text", "not a value of type str$"),
        ({}, "not a value of type dict with none in it$"),
        ([object()], r"\[0\] of into: a torch tensor or a numpy array is needed, not a object"),
    ):
        with pytest.raises(TypeError, match=words):
            conveyor.get(ref, into=into)
    locked = np.zeros(3, "int32")
    locked.flags.writeable = False
    for into, words in (
        (locked, "^what is read into is read-only"),
        ([locked], r"^\[0\] of into: .* read-only"),
        ({"w": [target, locked]}, r"^\['w'\]\[1\] of into: .* read-only"),
        ({"w": np.zeros((2, 3)).T}, r"^\['w'\] of into: .* contiguous"),
    ):
        with pytest.raises(ValueError, match=words):
            conveyor.get(ref, into=into)
    for refs, into in (([ref], target), ([ref], [target] * 2), ({"a": ref}, {"b": target})):
        with pytest.raises(ValueError, match=r"for a mapping of ref|for 1 references"):
            conveyor.get(refs, into=into)
    for refs, into in ((5, target), ([5], [target])):
        with pytest.raises(TypeError, match="get takes references"):
            conveyor.get(refs, into=into)
    with pytest.raises(TypeError, match="unexpected keyword"):
        conveyor.get(ref, nothing=1)


def test_parts_of_parts(holder):
    ref = holder.array.remote((3, 4, 5))
    expected = np.arange(60).reshape(3, 4, 5)
    for one, other in [
        (1, 2),
        (slice(1, 3), 0),
        (0, slice(1, 3)),
        ((slice(None), 1), (2, 3)),
        (slice(0, 3, 2), 1),
    ]:
        part = ref[one][other]
        np.testing.assert_array_equal(conveyor.get(part, timeout=WAIT), expected[one][other])
        assert get(holder.total.remote(part)) == expected[one][other].sum()


def test_parts_of_what_is_one_of_several_results(holder):
    array, mapping = holder.two.remote()
    expected = np.arange(12.0).reshape(3, 4)
    np.testing.assert_array_equal(conveyor.get(array[1], timeout=WAIT), expected[1])
    np.testing.assert_array_equal(conveyor.get(array[1:, 2], timeout=WAIT), expected[1:, 2])
    np.testing.assert_array_equal(conveyor.get(mapping["a"], timeout=WAIT), np.ones(3))
    assert get(holder.total.remote(array[2])) == expected[2].sum()
    assert get(holder.total.remote(mapping["a"][1])) == 1


def test_into_memory_of_a_part_and_of_one_of_several_results(holder):
    array, _ = holder.two.remote()
    target = np.empty((3, 4))
    assert conveyor.get(array, into=target, timeout=WAIT) is target
    np.testing.assert_array_equal(target, np.arange(12.0).reshape(3, 4))
    here = conveyor.put(np.arange(12.0).reshape(3, 4), tensor_transport="auto")
    for ref in (array, here):
        for index in (1, slice(1, 3), (slice(None), 2)):
            part = np.empty_like(target[index])
            conveyor.get(ref[index], into=part, timeout=WAIT)
            np.testing.assert_array_equal(part, target[index])


def test_parts_of_a_graphs_result_that_waits_for_effects(holder):
    with InputNode() as given:
        made = holder.array.bind(given)
    with MultiOutputNode([made], effects=[holder.total.bind(made)]).compile() as graph:
        [ref] = graph.execute((3, 4))
        expected = np.arange(12).reshape(3, 4)
        np.testing.assert_array_equal(conveyor.get(ref[1], timeout=WAIT), expected[1])
        assert get(holder.total.remote(ref[2])) == expected[2].sum()
        target = np.empty((3, 4), "int32")
        assert conveyor.get(ref, into=target, timeout=WAIT) is target
        np.testing.assert_array_equal(target, expected)


def test_a_generators_reference_has_no_parts(holder):
    items = holder.items.remote()
    for use in (
        lambda: conveyor.get(items[0], timeout=5),
        lambda: conveyor.get(items, into=np.empty(3), timeout=5),
    ):
        with pytest.raises(TypeError, match="no parts"):
            use()
    np.testing.assert_array_equal(items.next(10), np.ones(3))


SIDE = {}


def other_value():
    return conveyor.get(SIDE["ref"])


class Rebuilt:
    """Code that is run where a result is decoded gets another one."""

    def __reduce__(self):
        return other_value, ()


@conveyor.remote
class Odd:
    @conveyor.method(num_returns=2)
    def two(self):
        return Rebuilt(), 1


def test_what_is_got_while_another_value_is_decoded_is_fetched(holder):
    SIDE["ref"] = holder.array.remote((3,))
    odd = Odd.remote()
    rebuilt, _ = odd.two.remote()
    try:
        np.testing.assert_array_equal(get(rebuilt), np.arange(3))
    finally:
        SIDE.clear()
        conveyor.kill(odd)


def read_sizes(monkeypatch):
    """How many bytes each part has come with."""
    from conveyor.direct import fetching

    sizes = []
    room_for = fetching._allocate
    monkeypatch.setattr(fetching, "_allocate", lambda size: sizes.append(size) or room_for(size))
    return sizes


def test_parts_of_parts_of_containers(holder, monkeypatch):
    sizes = read_sizes(monkeypatch)
    ref = holder.layers.remote()
    expected = layers()
    first = ref["layers"][0]
    assert get(first["w"][10:20]).equal(expected["layers"][0]["w"][10:20])
    assert get(ref["layers"][1]["b"]).tolist() == [1.0] * 8
    assert get(ref["table"][3, 4]) == 3004
    assert get(ref["step"]) == 7
    assert get(ref["layers"][0]["name"]) == "first"
    assert sizes == [10 * 1000 * 4, 8 * 4, 8, 0, 0]
    sizes.clear()
    both = get(first)
    assert both["w"].equal(expected["layers"][0]["w"])
    assert both["b"].tolist() == [0.0] * 8
    assert both["odd"].tolist() == [1, 2, 3]
    assert sum(sizes) < 1000 * 1000 * 4 + 256
    assert get(holder.total.remote(ref["layers"][1]["w"][:, 0])) == sum(range(1000))
    assert get(holder.total.remote(first["odd"])) == 6
    target = torch.zeros(5, 1000)
    assert conveyor.get(first["w"][5:10], into=target) is target
    assert target.equal(expected["layers"][0]["w"][5:10])
    into = {"w": torch.zeros(1000, 1000), "b": torch.zeros(8), "odd": np.zeros(3, "u1")}
    conveyor.get(first, into=into)
    assert into["w"].equal(expected["layers"][0]["w"])
    assert into["odd"].tolist() == [1, 2, 3]


def test_parts_of_containers_that_there_are_not(holder):
    ref = holder.layers.remote()
    for part, error in (
        (ref["nothing"], KeyError),
        (ref["layers"][2], IndexError),
        (ref["layers"]["w"], TypeError),
        (ref["table"][1000], IndexError),
        (ref["step"][0], TypeError),
    ):
        with pytest.raises(error):
            get(part)


def test_what_looks_at_its_memory_when_it_is_loaded_comes_as_a_whole(holder):
    ref = holder.looking.remote()
    assert get(ref["sum"]).value == 45
    assert get(ref["array"]).tolist() == list(range(10))
    assert get(ref["even"]).tolist() == [0, 2, 4, 6, 8]


def test_parts_of_views_and_of_other_orders(holder):
    ref = holder.views.remote()
    expected = views()
    for key, one in expected.items():
        for index in (1, slice(1, 2), (slice(None), 1), ..., None, (0, ...)):
            np.testing.assert_array_equal(get(ref[key][index]), one[index])
    for index in ((slice(None), slice(0, 2)), (..., 1), (None, 1)):
        np.testing.assert_array_equal(get(holder.array.remote((4, 3), order="F")[index]),
                                      np.arange(12).reshape(4, 3, order="F")[index])  # fmt: skip


def test_narrow_parts_of_tall_arrays(holder, monkeypatch):
    sizes = read_sizes(monkeypatch)
    ref = holder.array.remote((200_000, 8))
    whole = np.arange(1_600_000, dtype="int32").reshape(-1, 8)
    np.testing.assert_array_equal(get(ref[:, 3]), whole[:, 3])
    np.testing.assert_array_equal(get(ref[1000:3000, 2:4]), whole[1000:3000, 2:4])
    np.testing.assert_array_equal(get(ref[10:-10:1000]), whole[10:-10:1000])
    np.testing.assert_array_equal(get(ref[::2, ::3]), whole[::2, ::3])
    # Whole rows rather than 200,000 runs; but a run for each of few rows.
    assert sizes[:2] == [whole.nbytes, whole[1000:3000].nbytes]
    assert sizes[2] == whole[10:-10:1000].nbytes
    wide = holder.tensor.remote((64, 100_000))
    sizes.clear()
    assert get(wide[:, 5]).tolist() == [100_000 * i + 5 for i in range(64)]
    assert sizes == [64 * 8]
    part = get(ref[:, 3])
    part += 1
    assert part.base is None
    target = np.zeros(200_000, "int32")
    assert conveyor.get(ref[:, 3], into=target) is target
    np.testing.assert_array_equal(target, whole[:, 3])
    np.testing.assert_array_equal(get(ref[:, 3][5:10]), whole[5:10, 3])
    assert get(holder.total.remote(ref[:, 3])) == whole[:, 3].sum()


def test_resharding(holder):
    ref = holder.tensor.remote((8, 6))
    whole = torch.arange(48).reshape(8, 6)
    shards = torch.zeros(8, 6, dtype=torch.int64)
    parts = [ref[i * 2 : i * 2 + 2] for i in range(4)]
    into = [shards[i * 2 : i * 2 + 2] for i in range(4)]
    got = conveyor.get(parts, into=into)
    assert all(one is target for one, target in zip(got, into, strict=True))
    assert shards.equal(whole)
    columns = {i: torch.zeros(8, 2, dtype=torch.int64) for i in range(3)}
    conveyor.get({i: ref[:, 2 * i : 2 * i + 2] for i in range(3)}, into=columns, timeout=WAIT)
    assert torch.cat([columns[i] for i in range(3)], 1).equal(whole)
    with pytest.raises(ValueError, match=r"shape \[2, 6\]"):
        conveyor.get([ref[:2]], into=[torch.zeros(3, 6, dtype=torch.int64)])


def test_nothing_is_left(holder, wait_until):
    wait_until(lambda: conveyor.objects() == [])


@pytest.mark.parametrize("key", ["other", "_taken", "_decode_joined"])
def test_a_part_of_a_part_is_all_that_comes_whatever_it_is_called(holder, key):
    inner = holder.named.remote(key)["a"][key]
    conveyor.wait([inner])
    assert len(inner._unfetched().where.ranges) == 16  # one run, of the part's bytes
    assert conveyor.get(inner).tolist() == [1.0] * 100
