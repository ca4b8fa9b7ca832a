"""What the ranks of a collective compute, and which inputs they refuse, without any process."""

from __future__ import annotations

import pickle
import time

import numpy as np
import pytest

from conveyor import _core
from conveyor.dag.collective import kernels
from conveyor.dag.collective.calls import (
    AllGather,
    AllReduce,
    AllToAll,
    FusedAllReduce,
    JoinParts,
    ReducePart,
    ReduceScatter,
    Scatter,
)
from conveyor.dag.collective.kernels import ELEMENT_TYPES, TENSORS, ReduceOp

torch = pytest.importorskip("torch")

NAMES = ("a", "b", "c", "d")
FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("uint8", "int8", "int16", "int32", "int64")


@pytest.fixture(autouse=True)
def without_an_arena(monkeypatch):
    monkeypatch.setattr(kernels, "IN_ARENA", 1 << 60)


def inputs(dtype, ranks, shape=(7,), seed=0):
    generator = torch.Generator().manual_seed(seed)
    kind = getattr(torch, dtype)
    if dtype in INTEGERS:
        return [torch.randint(1, 4, shape, generator=generator).to(kind) for _ in range(ranks)]
    return [(torch.rand(shape, generator=generator) * 4 - 2).to(kind) for _ in range(ranks)]


def expected(op, tensors):
    """In 64 bits, or exactly."""
    exact = tensors[0].dtype.is_floating_point
    stacked = torch.stack(tensors).to(torch.float64 if exact else tensors[0].dtype)
    if op is ReduceOp.SUM:
        return stacked.sum(0, dtype=stacked.dtype)
    if op is ReduceOp.AVG:
        return stacked.mean(0)
    if op is ReduceOp.PRODUCT:
        return stacked.prod(0, dtype=stacked.dtype)
    return stacked.amin(0) if op is ReduceOp.MIN else stacked.amax(0)


@pytest.mark.parametrize("op", ReduceOp)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [0, 7, 5000, 70_001])
def test_every_type_is_reduced_as_in_64_bits(op, ranks, size):
    for dtype in FLOATS + INTEGERS:
        if dtype in INTEGERS and op is ReduceOp.AVG:
            continue
        tensors = inputs(dtype, ranks, (size,))
        before = [tensor.clone() for tensor in tensors]
        found = AllReduce("allreduce", NAMES[:ranks], 0, op)(*tensors)
        wanted = expected(op, tensors)
        assert found.dtype == tensors[0].dtype
        assert all(map(torch.equal, tensors, before))
        if tensors[0].dtype.is_floating_point:
            # One rounding of an exact result is off by half a unit in the last place; of the 32-bit one a
            # little more.
            units = 0.51 if dtype in ("float16", "bfloat16") else 4
            unit = torch.finfo(found.dtype).eps
            off = (found.double() - wanted).abs()
            limit = units * unit * wanted.abs().clamp(min=0.01 if units < 1 else 1)
            assert bool((off <= limit).all()), (dtype, off.max())
        else:
            assert torch.equal(found, wanted), dtype


def test_halves_are_rounded_once():
    # 256 + 1 is 256 in bfloat16: rounded each time, the sum would stay there.
    for dtype, big in ((torch.bfloat16, 256.0), (torch.float16, 2048.0)):
        tensors = [torch.tensor([value], dtype=dtype) for value in (big, 1.0, 1.0, 2.0)]
        assert AllReduce("allreduce", NAMES, 0)(*tensors).item() == big + 4
    half = [np.array([value], np.float16) for value in (2048, 1, 1, 2)]
    assert AllReduce("allreduce", NAMES, 0)(*half)[0] == 2052
    most = [torch.tensor([60000.0], dtype=torch.float16)] * 2
    assert AllReduce("allreduce", NAMES[:2], 0, ReduceOp.AVG)(*most).item() == 60000


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_all_halves_are_reduced_to_the_bits_of_one_rounding(op, dtype):
    # As the library is built: the native core's own tests are built otherwise.
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(getattr(torch, dtype))
    number = ELEMENT_TYPES.index(dtype)
    function = TENSORS.function(op)
    for seed in range(20):
        others = every[torch.randperm(len(every), generator=torch.Generator().manual_seed(seed))]
        found = torch.empty_like(every)
        sources = tuple(TENSORS.buffer(one) for one in (every, others))
        _core.reduce((TENSORS.buffer(found),), sources, number, op.value)
        wanted = function(every.float(), others.float()).to(every.dtype)
        same = (found == wanted) | (found.isnan() & wanted.isnan())
        assert bool(same.all()), (seed, every[~same], others[~same])


def test_halves_take_about_as_long_as_other_floats():
    # They took 15 to 100 times as long where the compiler had made no vectors of their loops.
    def least(dtype, op):
        sources = tuple(np.zeros(256 << 10, np.uint8) for _ in range(2 + (op is ReduceOp.AVG)))
        out, times = np.zeros(256 << 10, np.uint8), []
        for _ in range(30):
            start = time.perf_counter()
            _core.reduce((out,), sources, ELEMENT_TYPES.index(dtype), op.value)
            times.append(time.perf_counter() - start)
        return min(times)

    for op in (ReduceOp.SUM, ReduceOp.AVG):
        assert least("float16", op) < 9 * least("bfloat16", op)


@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX])
def test_what_is_not_a_number_stays_so(op):
    nan = [torch.tensor([1.0, float("nan")]), torch.tensor([float("nan"), 2.0])]
    assert AllReduce("allreduce", NAMES[:2], 0, op)(*nan).isnan().all()


def test_bool_has_min_and_max():
    values = [torch.tensor([True, False, False]), torch.tensor([True, True, False])]
    assert AllReduce("allreduce", NAMES[:2], 0, ReduceOp.MAX)(*values).tolist() == [1, 1, 0]
    assert AllReduce("allreduce", NAMES[:2], 0, ReduceOp.MIN)(*values).tolist() == [1, 0, 0]
    for op in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.AVG):
        with pytest.raises(TypeError, match=f"{op.name} of torch.bool: MAX tells whether any"):
            AllReduce("allreduce", NAMES[:2], 0, op)(*values)


def test_the_average_of_integers_is_refused():
    with pytest.raises(TypeError, match="AVG of int64 is no integer"):
        AllReduce("allreduce", NAMES[:2], 0, ReduceOp.AVG)(np.array([1]), np.array([2]))


def test_arrays_of_numpy_of_any_shape():
    for shape in ((), (3,), (2, 3), (300, 40)):
        for ranks in (2, 3):
            arrays = [np.full(shape, i + 1.5, np.float32) for i in range(ranks)]
            found = AllReduce("allreduce", NAMES[:ranks], 0)(*arrays)
            assert type(found) is np.ndarray
            assert np.array_equal(found, sum(arrays))
    strided = [np.arange(12.0).reshape(3, 4).T, np.ones((4, 3))]
    assert np.array_equal(AllReduce("x", NAMES[:2])(*strided), strided[0] + 1)


def test_tensors_that_lie_anyhow_and_record_gradients():
    first = torch.arange(12.0).reshape(3, 4).T.requires_grad_()
    found = AllReduce("x", NAMES[:3])(first, torch.ones(4, 3), torch.ones(8, 3)[::2])
    assert not found.requires_grad
    assert torch.equal(found, first.detach() + 2)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("shape", [(), (2,), (5, 7), (300, 331)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_rounds_give_the_bits_of_one(ranks, shape, dtype):
    tensors, names = inputs(dtype, ranks, shape), NAMES[:ranks]
    parts = [ReducePart("part", names, rank)(*tensors) for rank in range(ranks)]
    once = AllReduce("allreduce", names)(*tensors)
    for rank in range(ranks):
        joined = JoinParts("allreduce", names, rank)(tensors[rank], *parts)
        assert joined.shape == once.shape
        assert torch.equal(joined, once)


def test_shares_of_dimension_0():
    tensors = inputs("float32", 2, (4, 3))
    total = tensors[0] + tensors[1]
    for rank in range(2):
        rows = slice(2 * rank, 2 * rank + 2)
        shared = ReduceScatter("reducescatter", NAMES[:2], rank)(*tensors)
        assert torch.equal(shared, total[rows])
        swapped = AllToAll("all_to_all", NAMES[:2], rank)(*tensors)
        assert torch.equal(swapped, torch.cat([tensor[rows] for tensor in tensors]))
        share = Scatter("scatter", NAMES[:2], rank)(tensors[0])
        assert torch.equal(share, tensors[0][rows])
        assert share.data_ptr() == tensors[0][rows].data_ptr()
    assert torch.equal(AllGather("allgather", NAMES[:2])(*tensors), torch.cat(tensors))
    listed = AllGather("allgather", NAMES[:2], 0, False)(*tensors)
    assert [one.data_ptr() for one in listed] == [one.data_ptr() for one in tensors]


@pytest.mark.parametrize("shape", [(), (3,), (5, 2)])
@pytest.mark.parametrize("kind", [ReduceScatter, AllToAll])
def test_a_dimension_0_that_cannot_be_shared(kind, shape):
    with pytest.raises(ValueError, match=r"over 2 actors \(a, b\): dimension 0 .* multiple of 2"):
        kind("some", NAMES[:2])(*[torch.ones(shape)] * 2)
    with pytest.raises(ValueError, match="multiple of 2"):
        Scatter("some", NAMES[:2])(torch.ones(shape))


def test_ranks_that_differ_are_listed():
    def refused(error, *values):
        with pytest.raises(error) as caught:
            AllReduce("allreduce", NAMES[: len(values)])(*values)
        return str(caught.value)

    assert refused(ValueError, torch.ones(2), torch.ones(3)) == (
        "allreduce over 2 actors: the ranks differ: a has a tensor of float32 with shape (2,), b has a "
        "tensor of float32 with shape (3,)"
    )
    said = refused(ValueError, torch.ones(2), torch.ones(2), torch.ones(2, dtype=torch.float64))
    assert "c has a tensor of float64 with shape (2,)" in said
    assert "b has an array of float32" in refused(ValueError, torch.ones(2), np.ones(2, "f4"))
    assert "a has a float, b has a tensor" in refused(TypeError, 1.0, torch.ones(1))
    assert "takes tensors or arrays" in refused(TypeError, np.ones(1), None)
    said = refused(TypeError, torch.ones(2), torch.ones(2, device="meta"))
    assert "on the CPU" in said
    assert "on meta" in said
    assert "complex64 is not reduced" in refused(
        TypeError, *[torch.ones(2, dtype=torch.cfloat)] * 2
    )
    with pytest.raises(TypeError, match="takes a tensor or an array apart, not a list"):
        Scatter("scatter", NAMES[:2])([1, 2])
    with pytest.raises(ValueError, match="no dimensions"):
        AllGather("allgather", NAMES[:2])(torch.tensor(1.0), torch.tensor(2.0))


@pytest.mark.parametrize("rank", [AllReduce, ReducePart, AllGather, AllToAll, ReduceScatter])
def test_a_tensor_whose_storage_was_freed_is_refused(rank):
    values = torch.ones(4), torch.ones(4)
    values[1].untyped_storage().resize_(8)
    with pytest.raises(
        ValueError, match=r"over 2 actors: .* its storage has 8 bytes and the tensor needs 16"
    ):
        rank("some", NAMES[:2])(*values)


class Named(np.ndarray):
    pass


class Marked(torch.Tensor):
    pass


@pytest.mark.parametrize("size", [4, 4000])
@pytest.mark.parametrize("rank", [AllReduce, ReducePart, AllGather, AllToAll, ReduceScatter])
@pytest.mark.parametrize(
    "make",
    [
        lambda size: np.ma.masked_array(np.ones(size), np.arange(size) % 2),
        lambda size: np.ones(size).view(Named),
        lambda size: np.matrix(np.ones((size, 2))),
        lambda size: torch.ones(size).as_subclass(Marked),
    ],
    ids=["masked", "subclass", "matrix", "tensor"],
)
@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
def test_what_may_mean_more_than_its_elements_is_refused_by_all(make, rank, size):
    plain = np.ones(size) if isinstance(make(size), np.ndarray) else torch.ones(size)
    if make(size).ndim == 2:
        plain = np.ones((size, 2))
    for values in ((make(size), make(size)), (plain, make(size))):
        with pytest.raises(TypeError, match=r"has a .*, which may mean more than its elements"):
            rank("some", NAMES[:2])(*values)
    apart = AllGather("allgather", NAMES[:2], join=False)(plain, make(size))
    assert [type(one) for one in apart] == [type(plain), type(make(size))]


def test_arrays_in_files_and_parameters_are_plain(tmp_path):
    array = np.memmap(tmp_path / "array", np.float32, "w+", shape=(4,))
    parameter = torch.nn.Parameter(torch.ones(4))
    for value in (array, parameter):
        found = AllGather("allgather", NAMES[:2])(value, value)
        assert found.tolist() == value.tolist() * 2


@pytest.mark.parametrize("rank", [AllReduce, AllGather, AllToAll])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_quantized_tensors_are_refused_by_all(rank):
    value = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)
    with pytest.raises(TypeError, match=r"over 2 actors: torch\.qint8 is not (reduced|joined): "):
        rank("some", NAMES[:2])(value, value)


def test_a_list_is_checked_whole_before_any_of_it_is_reduced():
    fused = FusedAllReduce("allreduce", NAMES[:2])
    found = fused((torch.ones(2), torch.ones(3)), (torch.ones(2), torch.ones(3)))
    assert [one.tolist() for one in found] == [[2, 2], [2, 2, 2]]
    with pytest.raises(ValueError, match="tensor 1 of each list: the ranks differ"):
        fused((torch.ones(2), torch.ones(3)), (torch.ones(2), torch.ones(2)))


def test_what_ranks_run_can_be_sent():
    rank = pickle.loads(pickle.dumps(ReduceScatter("reducescatter", NAMES[:2], 1, ReduceOp.MAX)))
    assert rank == ReduceScatter("reducescatter", NAMES[:2], 1, ReduceOp.MAX)
    assert rank.__name__ == "reducescatter"


def test_a_full_arena_is_no_error_of_a_result(monkeypatch):
    def full(*_):
        raise MemoryError

    monkeypatch.setattr(kernels, "IN_ARENA", 0)
    monkeypatch.setattr("conveyor.empty", full)
    monkeypatch.setattr("conveyor.empty_tensor", full)
    large = 10_000
    assert AllReduce("x", NAMES[:2])(*[np.ones(large)] * 2).sum() == 2 * large
    assert AllReduce("x", NAMES[:2])(*[torch.ones(large)] * 2).sum() == 2 * large


@pytest.mark.parametrize("dtype", [">f4", "<f4", "longdouble", ">i8", "uint16", "float16"])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_arrays_that_the_native_core_does_not_know_are_reduced_too(dtype, ranks):
    arrays = [np.arange(9000).astype(dtype) % 17 + rank for rank in range(ranks)]
    made = AllReduce("allreduce", NAMES, 0, ReduceOp.SUM)(*arrays)
    assert made.dtype == arrays[0].dtype
    assert made.tolist() == np.stack(arrays).astype(np.int64).sum(0).tolist()


def test_negated_views_are_reduced_as_what_they_mean():
    imaginary = torch.complex(torch.zeros(9000), torch.ones(9000)).conj().imag
    assert imaginary.is_neg()
    made = AllReduce("allreduce", NAMES, 0, ReduceOp.SUM)(*[imaginary] * 3)
    assert made.tolist() == [-3.0] * 9000


@pytest.mark.parametrize("size", [20_000, 9, 3, 2])  # parts of many elements, of one and of none
@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_flat_inputs_with_gaps_are_reduced_as_others(library, size):
    if library == "torch":
        given = [(torch.arange(3.0 * size) + rank)[::3] for rank in range(3)]
    else:
        given = [(np.arange(float(size)) + rank)[::-1] for rank in range(3)]
    names = NAMES[:3]
    wanted = sum(given).tolist()
    assert AllReduce("allreduce", names)(*given).tolist() == wanted
    parts = [ReducePart("part", names, rank)(*given) for rank in range(3)]
    assert JoinParts("allreduce", names)(given[0], *parts).tolist() == wanted
