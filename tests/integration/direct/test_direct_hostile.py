"""What stays with its actor, in the hands of those who use all that there is: odd memory, odd parts."""

import asyncio
import pickle

import numpy as np
import pytest
from integration_helpers import get
from nodes_apart import APART

import conveyor
from conveyor.experimental import wait_tensor_freed

torch = pytest.importorskip("torch")
PRELOAD = ["torch"]

INTEGERS = np.arange(24).reshape(2, 3, 4)


@conveyor.remote
class Maker:
    @conveyor.method(tensor_transport="auto")
    def integers(self):
        return INTEGERS.copy()

    @conveyor.method(tensor_transport="auto")
    def line(self):
        return np.arange(10.0)

    @conveyor.method(tensor_transport="auto", num_returns=2)
    def two(self):
        return np.arange(10.0), np.arange(20.0)

    @conveyor.method(tensor_transport="auto")
    def fails(self):
        raise KeyError("x")

    @conveyor.method(tensor_transport="auto")
    def odd(self, kind):
        return odd(kind)

    @conveyor.method(tensor_transport="auto")
    def summed(self):
        array = np.arange(10.0)
        return [array, Summed(array)]

    @conveyor.method(tensor_transport="auto")
    def of_another_library(self, library):
        """What DLPack gives of an array that cannot be pickled."""
        self.theirs = Theirs()
        made = {"numpy": np, "torch": torch}[library].from_dlpack(self.theirs)
        return made

    @conveyor.method(tensor_transport="auto")
    def give(self, value):
        return value

    def write_theirs(self, value):
        self.theirs.memory[:] = value

    def total(self, value):
        return float(value.sum())


class Theirs:
    """An array of a library that has DLPack and nothing else."""

    def __init__(self):
        self.memory = np.arange(5.0)

    def __dlpack__(self, **options):
        return self.memory.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.memory.__dlpack_device__()

    def __reduce__(self):
        raise TypeError("it cannot be pickled")


class Summed:
    """It looks at its array, and changes it, when it is loaded."""

    def __init__(self, array):
        self.array = array

    def __setstate__(self, state):
        self.array = state["array"]
        self.array *= 2
        self.sum = self.array.sum()


def odd(kind):
    """Arrays and tensors of which the memory is not what an array of that shape would have."""
    return {
        "F": lambda: np.asfortranarray(np.arange(12).reshape(3, 4)),
        "transposed": lambda: torch.arange(12.0).reshape(3, 4).T,
        "channels last": lambda: (
            torch.arange(48.0).reshape(1, 3, 4, 4).to(memory_format=torch.channels_last)
        ),
        "conjugate": lambda: (torch.arange(4) * (1 + 2j)).conj(),
        "dates": lambda: np.array(["2020-01-01", "NaT"], dtype="M8[D]"),
        "times": lambda: np.array([1, 2], dtype="m8[s]"),
        "date": lambda: np.array("2020-01-01", dtype="M8[D]"),
        # What lies beside it has as many bytes as the references to what is in it.
        "objects": lambda: np.array([{1: 2}, None, np.arange(3)], dtype=object),
    }[kind]()


@pytest.fixture(scope="module")
def maker(session):
    made = Maker.remote()
    yield made
    conveyor.kill(made)


@pytest.mark.parametrize(
    "kind",
    [
        "F",
        "transposed",
        "channels last",
        "conjugate",
        "dates",
        "times",
        "date",
        "objects",
    ],
)
def test_into_what_lies_in_another_order(maker, kind):
    expected = odd(kind)
    if isinstance(expected, np.ndarray):
        target = np.empty(expected.shape, expected.dtype)
    else:
        target = torch.empty(expected.shape, dtype=expected.dtype)
    assert conveyor.get(maker.odd.remote(kind), into=target) is target
    assert str(target.tolist()) == str(expected.tolist())


def test_into_with_objects_that_look_at_their_memory_when_they_are_loaded(maker):
    target = np.full(10, 7.0)
    with pytest.raises(ValueError, match="of float64"):
        conveyor.get(maker.summed.remote(), into=[target.view("int64")])
    assert target.tolist() == [7.0] * 10
    value = conveyor.get(maker.summed.remote(), into=[target])
    assert value[1].sum == target.sum() == 90
    assert value[0] is target
    assert np.shares_memory(value[1].array, target)


@pytest.mark.parametrize("into", [5, "abc", {}, np.float64(1)])
def test_into_what_takes_nothing(maker, into):
    with pytest.raises(TypeError, match="takes a tensor, an array, or a list of them"):
        conveyor.get(maker.line.remote(), into=into)


@pytest.mark.parametrize(
    "index",
    [
        ...,
        (..., 0),
        None,
        (0, None),
        True,
        [0, 1],
        np.array([1, 0]),
        np.int64(1),
        (np.int64(1), slice(np.int64(1), None)),
        (),
    ],
    ids=str,
)
def test_parts_by_anything_that_numpy_takes(maker, index):
    assert np.array_equal(get(maker.integers.remote()[index]), INTEGERS[index])
    assert get(maker.total.remote(maker.integers.remote()[index])) == INTEGERS[index].sum()


@pytest.mark.parametrize("index", ["a", 0.5, (..., ...)], ids=str)
def test_what_is_no_index(maker, index):
    with pytest.raises(IndexError):
        get(maker.integers.remote()[index])


def test_an_element_is_a_scalar_wherever_it_is_fetched_from(maker):
    element = get(maker.integers.remote()[1, 2, 3])
    assert type(element) is np.int64
    assert {element: 1}[23] == 1
    target = np.zeros((), int)
    assert conveyor.get(maker.integers.remote()[1, 2, 3], into=target) is target
    assert target == 23


def test_parts_of_parts_and_of_one_of_several_results(maker):
    whole = maker.line.remote()
    part = whole[2:8]
    assert get(part[1:3]).tolist() == [3, 4]
    assert get(part[1:3][0]) == 3
    assert get(maker.total.remote(part[1:3])) == 7
    second = maker.two.remote()[1]
    assert get(second[3:5]).tolist() == [3, 4]
    assert get(maker.total.remote(second[3:5][1:])) == 4
    assert get(pickle.loads(pickle.dumps(part[1:3]))).tolist() == [3, 4]
    assert conveyor.get(part[1:3], into=np.zeros(2)).tolist() == [3, 4]
    assert conveyor.get(second, into=np.zeros(20)).sum() == 190

    async def awaited():
        return await asyncio.gather(part[1:3], second[1:3])

    assert [one.tolist() for one in asyncio.run(awaited())] == [[3, 4], [1, 2]]


def test_a_part_says_what_it_is_of(maker):
    whole = maker.line.remote()
    assert repr(whole[1:][0]).startswith(
        "<PartRef (0,) of <PartRef (slice(1, None, None),) of <CallRef "
    )
    get(whole)
    assert repr(whole) in repr(whole[0])
    assert "not sent" not in repr(whole[0])


def test_a_snapshot_is_taken_or_not(maker):
    with pytest.raises(TypeError, match="snapshot must be True or False, not None"):
        maker.line.options(snapshot=None)


def test_parts_of_a_failure(maker):
    failed = maker.fails.remote()[1:]
    with pytest.raises(KeyError):
        get(failed[1:])
    assert failed.has_failed()
    assert failed[1:].has_failed()


def test_a_sparse_tensor_cannot_be_waited_for():
    with pytest.raises(TypeError, match="sparse"):
        wait_tensor_freed(torch.eye(3).to_sparse())


AFTER = """
import numpy as np, conveyor
from conveyor.exceptions import RuntimeStateError

@conveyor.remote
class Maker:
    @conveyor.method(tensor_transport="auto")
    def line(self):
        return np.arange(10.0)

ref = Maker.remote().line.remote()
conveyor.wait([ref])
conveyor.shutdown()
try:
    conveyor.get(ref, into=np.zeros(10))
except RuntimeStateError as error:
    print(error, conveyor.is_initialized())
"""


def test_into_after_the_session_begins_no_other(scripts):
    said = scripts.run(AFTER)
    assert "its session has ended" in said
    assert said.split()[-1] == "False"


@pytest.mark.parametrize("make", [np.arange, torch.arange])
def test_into_memory_that_the_value_lies_in_itself(maker, make):
    memory = make(12.0)
    pieces = [memory[:4], memory[4:8]]
    ref = conveyor.put(pieces, tensor_transport="auto")
    conveyor.get(ref, into=[memory[4:8], memory[8:]])
    assert memory.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7]
    conveyor.get(ref, into=[memory[8:], memory[2:6]])
    assert memory.tolist() == [0, 1, 0, 1, 2, 3, 2, 3, 0, 1, 2, 3]
    whole = conveyor.put(memory[:8], tensor_transport="auto")
    conveyor.get(whole, into=memory[2:10])
    assert memory.tolist() == [0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3]
    conveyor.get(whole, into=memory[:8])
    assert memory.tolist() == [0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3]
    steps = conveyor.put(memory[::2], tensor_transport="auto")
    conveyor.get(steps, into=memory[:6])
    assert memory.tolist() == [0, 0, 0, 2, 2, 2, 2, 3, 2, 3, 2, 3]


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_what_dlpack_gives_stays_without_a_copy(maker, library):
    ref = maker.of_another_library.remote(library)
    assert get(ref).tolist() == [0, 1, 2, 3, 4]
    assert ref.route() == ("network" if APART else "read")
    get(maker.write_theirs.remote(7))
    assert get(ref).tolist() == [7] * 5


@pytest.mark.parametrize(
    "make",
    [
        lambda path: np.memmap(path, dtype="f8", mode="w+", shape=(4,)),
        lambda path: np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    ],
)
def test_arrays_of_derived_classes_travel(maker, tmp_path, make):
    ref = maker.give.remote(make(str(tmp_path / "file")))
    expected = make(str(tmp_path / "file"))
    assert type(get(ref)) is type(expected)
    assert get(ref).tolist() == expected.tolist()
    assert ref.route() == "frame"


@pytest.mark.parametrize("make", [list, np.array, torch.tensor])
def test_a_part_is_that_of_the_index_as_it_was(maker, make):
    index = make([0, 1])
    part = maker.line.remote()[index]
    both = maker.integers.remote()[0, index]
    index[0] = 2
    assert get(part).tolist() == [0, 1]
    assert get(both).tolist() == INTEGERS[0, [0, 1]].tolist()


@pytest.mark.skipif(APART, reason="memory of this machine, read by processes of it")
def test_memory_that_nobody_else_can_read_travels_as_any_other(scripts):
    scripts.run(
        """
        import ctypes, mmap, os, sys
        import numpy as np
        import conveyor

        @conveyor.remote
        class Maker:
            def secret(self):
                memfd = ctypes.CDLL(None, use_errno=True).syscall(447, 0)
                if memfd < 0:
                    return False
                os.ftruncate(memfd, 1 << 16)
                self.array = np.frombuffer(mmap.mmap(memfd, 1 << 16), "f8")
                self.array[:] = 5
                return True

            @conveyor.method(tensor_transport="auto")
            def keep(self):
                return [np.ones(1000), self.array]

        @conveyor.remote
        class Reader:
            def read(self, arrays):
                return float(arrays[1].sum())

        maker, reader = Maker.remote(), Reader.remote()
        if conveyor.get(maker.secret.remote()):  # a kernel may have none
            ref = maker.keep.remote()
            assert conveyor.get(ref)[1].sum() == 5 * 8192
            assert conveyor.get(reader.read.remote(ref)) == 5 * 8192
        """
    )


@pytest.mark.skipif(APART, reason="memory of this machine, read by processes of it")
def test_who_becomes_unreadable_keeps_no_values_more_and_is_named(scripts):
    scripts.run(
        """
        import ctypes, os, sys
        import numpy as np
        import conveyor

        libc = ctypes.CDLL(None)
        PR_SET_DUMPABLE, PR_CAPBSET_DROP, CAP_SYS_PTRACE = 4, 24, 19
        if len(sys.argv) == 1 and libc.prctl(PR_CAPBSET_DROP, CAP_SYS_PTRACE, 0, 0, 0) == 0:
            os.execv(sys.executable, [sys.executable, sys.argv[0], "without it"])

        @conveyor.remote
        class Maker:
            @conveyor.method(tensor_transport="auto")
            def keep(self):
                return np.ones(200_000)

            def hide(self):
                ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)

        maker = Maker.remote()
        before = maker.keep.remote()
        assert conveyor.get(before).sum() == 200_000
        conveyor.get(maker.hide.remote())
        assert conveyor.get(maker.keep.remote()).sum() == 200_000
        try:
            conveyor.get(before)
        except conveyor.exceptions.TransportError as error:
            assert "Maker" in str(error) and "PR_SET_DUMPABLE" in str(error), error
        else:
            raise AssertionError("it was read")
        """
    )
