import gc
import pickle
import struct
import warnings
import weakref

import pytest
from codec_transport import Channel, run
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from conveyor.codec import frames as codec  # noqa: E402
from conveyor.codec.tensors import encoding  # noqa: E402
from conveyor.exceptions import SerializationError  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::UserWarning")]

codec.encode({}, None)  # torch is here: from now on the codec knows

NAMES = """
    bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64
    complex32 complex64 complex128 float8_e4m3fn float8_e5m2 float8_e8m0fnu
"""
DTYPES = [getattr(torch, name) for name in NAMES.split() if hasattr(torch, name)]


def as_bytes(tensor):
    plain = tensor.detach().resolve_conj().resolve_neg()
    copy = torch.empty(plain.shape, dtype=plain.dtype).copy_(plain)
    return bytes(copy.reshape(-1).view(torch.uint8).tolist()) if copy.numel() else b""


def make(dtype, shape):
    count = 1
    for n in shape:
        count *= n
    if dtype == torch.bool:
        return (torch.arange(count) % 2).bool().reshape(shape)
    raw = torch.arange(count * dtype.itemsize, dtype=torch.int64).remainder(100).to(torch.uint8)
    return (raw.view(dtype) if count else torch.empty(0, dtype=dtype)).reshape(shape)


def check_same(carried, tensor):
    assert type(carried) is type(tensor)
    assert carried.dtype == tensor.dtype
    assert carried.shape == tensor.shape
    assert carried.requires_grad == tensor.requires_grad
    assert carried.is_leaf
    assert as_bytes(carried) == as_bytes(tensor)


def both_ways(tensor, shared=False):
    channel = Channel(shared)
    return channel.carry(tensor), channel.carry({"t": [tensor]})["t"][0]


@given(
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 4), max_size=4),
    st.randoms(use_true_random=False),
    st.booleans(),
)
@settings(deadline=None, max_examples=300)
def test_any_tensor_survives(dtype, shape, random, shared):
    tensor = make(dtype, shape)
    axes = list(range(tensor.ndim))
    random.shuffle(axes)
    tensor = tensor.permute(axes)
    if tensor.ndim and tensor.shape[0] > 1 and random.random() < 0.5:
        tensor = tensor[1:] if random.random() < 0.5 else tensor[::2]
    if dtype.is_floating_point and random.random() < 0.5:
        tensor = tensor.detach().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "ComplexHalf")
        for carried in both_ways(tensor, shared):
            check_same(carried, tensor)
            with torch.no_grad():
                carried.zero_()  # always writable


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_goes_without_a_copy(dtype):
    tensor = make(dtype, (3, 4))
    encoded = codec.encode(tensor, None)
    assert encoded[0] == codec.TENSOR
    (buffer,) = encoded[3]
    assert memoryview(buffer).nbytes == tensor.numel() * tensor.element_size()
    assert buffer.ctypes.data == tensor.data_ptr()


def test_strides_of_a_dense_tensor_are_kept():
    tensor = torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1)
    image = torch.arange(120.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last)
    for original in (tensor, image, torch.ones(3, 4).t()):
        for carried in both_ways(original):
            check_same(carried, original)
            assert carried.stride() == original.stride()
        (buffer,) = codec.encode(original, None)[3]
        assert buffer.ctypes.data == original.data_ptr()


def test_a_view_brings_only_its_part():
    big = torch.arange(1_000_000)
    for value in (big[10:20], {"part": big[10:20]}):
        buffers = codec.encode(value, None)[3]
        assert sum(memoryview(b).nbytes for b in buffers) == 80
    for carried in both_ways(big[10:20]):
        check_same(carried, big[10:20])
        assert carried.untyped_storage().nbytes() == 80


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(3.0).expand(4, 3),
        torch.arange(3).reshape(3, 1).expand(3, 5).t(),
        torch.ones(1, dtype=torch.bfloat16).expand(7),
        torch.arange(24.0).reshape(4, 6)[:, ::2].expand(5, 4, 3),
        torch.arange(3.0, requires_grad=True).expand(4, 3),
        torch.tensor([1 + 2j]).conj().expand(6),
    ],
    ids=str,
)
def test_what_is_expanded_travels_once(tensor):
    for shared in (False, True):
        for carried in both_ways(tensor, shared):
            check_same(carried, tensor)
            assert [s == 0 for s in carried.stride()] == [s == 0 for s in tensor.stride()]
    for value in (tensor, {"in": tensor}):
        sent = sum(memoryview(b).nbytes for b in codec.encode(value, None)[3])
        assert sent == len(set(tensor.flatten().tolist())) * tensor.element_size()


def test_views_of_what_is_expanded_still_alias():
    tensor = torch.arange(3.0)
    wide = tensor.expand(1000, 3)
    value = [wide, wide[7], tensor, wide[:, 1:]]
    _, _, _, buffers = codec.encode(value, None)
    assert sum(memoryview(b).nbytes for b in buffers) == 12
    carried = Channel().carry(value)
    carried[2][1] = 9
    assert [part.unique().tolist() for part in carried] == [[0, 2, 9], [0, 2, 9], [0, 2, 9], [2, 9]]


def test_conjugate_negative_and_zero_tensors():
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    for original in (tensor.conj(), tensor.conj().imag, torch._efficientzerotensor(3)):
        for carried in both_ways(original):
            assert torch.equal(carried, original.clone())
            assert not carried.is_conj()
            assert not carried.is_neg()


def test_non_leaf_arrives_as_a_leaf():
    weight = torch.ones(3, requires_grad=True)
    for carried in both_ways(weight * 2):
        assert carried.requires_grad
        assert carried.is_leaf
        assert carried.tolist() == [2, 2, 2]
        carried.sum().backward()
        assert carried.grad.tolist() == [1, 1, 1]
    assert weight.grad is None


def test_the_tensor_holds_the_buffer():
    channel = Channel()
    frame = channel.send(torch.arange(10))
    held = weakref.ref(frame[3][0])
    tensor = channel.receive(frame)
    del frame
    part = tensor[2:4]
    del tensor
    gc.collect()
    assert held() is not None
    assert part.tolist() == [2, 3]
    del part
    gc.collect()
    assert held() is None


def test_writing_to_a_shared_tensor_is_private():
    channel = Channel(shared=True)
    for value in (torch.arange(4), [torch.arange(4)]):
        frame = channel.send(value)
        first, second = channel.receive(frame), channel.receive(frame)
        if isinstance(first, list):
            first, second = first[0], second[0]
        first[0] = 100
        assert second.tolist() == [0, 1, 2, 3]
        assert bytes(frame[3][0])[:8] == bytes(8)


def test_parameters_and_modules():
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    parameter = module[0].weight
    channel = Channel()
    carried = channel.carry(parameter)
    assert type(carried) is torch.nn.Parameter
    assert torch.equal(carried, parameter)
    again = channel.carry(module)
    for (name, a), (other, b) in zip(
        module.state_dict().items(), again.state_dict().items(), strict=True
    ):
        assert name == other
        assert torch.equal(a, b)
    _, _, _, buffers = codec.encode(module, None)
    assert sum(memoryview(b).nbytes for b in buffers) >= 4 * (12 + 4 + 4 * 4)


class Marked(torch.Tensor):
    pass


def test_tensor_subclass_goes_out_of_band():
    tensor = torch.arange(100_000.0).as_subclass(Marked)
    _, _, meta, buffers = codec.encode(tensor, None)
    assert len(meta) < 2000
    assert len(buffers) == 1
    carried = Channel(shared=True).carry(tensor)
    assert type(carried) is Marked
    assert torch.equal(carried, tensor)


def test_attributes_of_a_tensor_are_kept():
    tensor = torch.arange(3)
    tensor.note = "mine"
    for carried in both_ways(tensor):
        assert carried.note == "mine"
        assert carried.tolist() == [0, 1, 2]


def test_sparse_and_quantized_tensors():
    sparse = torch.eye(3).to_sparse()
    for carried in both_ways(sparse):
        assert torch.equal(carried.to_dense(), sparse.to_dense())
    for layout in ("to_sparse", "to_sparse_csr", "to_sparse_csc"):
        for kept in (True, False):
            original = getattr(torch.eye(3), layout)().requires_grad_(kept)
            for carried in both_ways(original):
                assert (carried.requires_grad, carried.is_leaf) == (kept, True)
    quantized = torch.quantize_per_tensor(torch.arange(3.0), 0.5, 0, torch.qint8)
    for carried in both_ways(quantized):
        assert torch.equal(carried.dequantize(), quantized.dequantize())


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: {"a": [t]}, torch.nn.Parameter])
def test_tensor_on_another_device(wrap):
    tensor = torch.empty(3, device="meta")
    with pytest.raises(SerializationError, match=r"device 'meta' has no values.*shape and dtype"):
        Channel().send(wrap(tensor))


# Shared memory within one value


def decorated():
    tensor = torch.ones(6)
    tensor.note = "here"
    return tensor


@pytest.mark.parametrize("left", [0, 8])
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(6),
        lambda: torch.ones(8)[2:],
        lambda: torch.ones(2, 3).t(),
        lambda: torch.ones(12)[::2],
        lambda: torch.ones(6, requires_grad=True),
        lambda: torch.nn.Parameter(torch.ones(6)),
        lambda: torch.ones(6, dtype=torch.bfloat16),
        lambda: torch.ones(6, dtype=torch.cfloat).conj(),
        lambda: torch.ones(3).expand(2, 3),
        lambda: torch.quantize_per_tensor(torch.ones(9), 0.1, 0, torch.qint8),
        decorated,
    ],
)
@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: {"t": [t]}], ids=["alone", "inside"])
def test_a_tensor_whose_storage_was_freed_is_refused(make, wrap, left):
    tensor = make()
    size = tensor.untyped_storage().nbytes()
    tensor.untyped_storage().resize_(left)
    with pytest.raises(
        SerializationError,
        match=rf"its storage has {left} bytes and the tensor needs {size - _behind(tensor)}\.",
    ):
        codec.encode(wrap(tensor), None)
    tensor.untyped_storage().resize_(size)
    codec.encode(wrap(tensor), None)


def _behind(tensor):
    """How many bytes of its whole storage lie behind a tensor's last element."""
    return 4 if tensor.stride() == (2,) else 0


def test_a_storage_may_be_shrunk_to_what_its_tensor_needs():
    big = torch.arange(8.0)
    for tensor in (big[:4], big[4:4], big[1:4:2], big[3:4].expand(9)):
        big.untyped_storage().resize_(16)
        for carried in both_ways(tensor):
            check_same(carried, tensor)
        big = torch.arange(8.0)


def test_the_same_tensor_twice_stays_one():
    tensor = torch.arange(4)
    a, b = Channel().carry([tensor, tensor])
    assert a is b


def test_storage_is_shared_within_a_value():
    tensor = torch.arange(12.0).reshape(3, 4)
    value = [tensor, tensor.detach(), tensor[1], tensor.t(), tensor.view(torch.int32)]
    _, _, _, buffers = codec.encode(value, None)
    assert len(buffers) == 1
    whole, same, row, turned, ints = Channel().carry(value)
    for carried, original in zip((whole, same, row, turned, ints), value, strict=True):
        check_same(carried, original)
    row[:] = 7
    assert whole[1].tolist() == [7] * 4
    assert turned[:, 1].tolist() == [7] * 4
    assert ints[1, 0] != 4
    assert tensor[1].tolist() == [4, 5, 6, 7]


def test_what_comes_behind_a_view_and_its_whole_lies_in_the_whole():
    tensor = torch.arange(12.0)
    value = [tensor[2:5], tensor, tensor[6:], tensor[3:5], tensor[::3]]
    _, _, _, buffers = codec.encode(value, None)
    assert sum(memoryview(b).nbytes for b in buffers) == 4 * (3 + 12)
    first, whole, *others = Channel(shared=True).carry(value)
    for part, original in zip((first, whole, *others), value, strict=True):
        check_same(part, original)
    whole.fill_(7)
    assert first.tolist() == [2, 3, 4]
    assert [set(part.tolist()) for part in others] == [{7}] * 3


def test_what_is_sparse_lets_go_of_its_memory():
    for original in (
        torch.eye(300).to_sparse(),
        torch.eye(300).to_sparse().coalesce(),
        torch.eye(300).to_sparse_csr(),
        torch.eye(300).to_sparse_bsc((3, 3)),
    ):
        channel = Channel(shared=True)
        frame = channel.send([original])
        held = [weakref.ref(buffer) for buffer in frame[3]]
        (carried,) = channel.receive(frame)
        assert carried.layout is original.layout
        assert torch.equal(carried.to_dense(), original.to_dense())
        if original.layout is torch.sparse_coo:
            assert carried.is_coalesced() == original.is_coalesced()
        del frame, carried
        gc.collect()
        assert [buffer() for buffer in held] == [None] * len(held)


def test_a_view_with_gaps_behind_its_whole_is_a_view():
    tensor = torch.arange(12.0).reshape(3, 4)
    value = [tensor, tensor[:, ::2], tensor[::2], tensor[:, 1], tensor.t()[1:3]]
    _, _, _, buffers = codec.encode(value, None)
    assert sum(memoryview(b).nbytes for b in buffers) == 48
    carried = Channel(shared=True).carry(value)
    for part, original in zip(carried, value, strict=True):
        check_same(part, original)
        assert part.stride() == original.stride()
    carried[0].fill_(7)
    assert [part.unique().tolist() for part in carried] == [[7]] * 5


def test_part_before_the_whole_is_a_copy():
    tensor = torch.arange(4)
    part, whole = Channel().carry([tensor[:2], tensor])
    assert part.tolist() == [0, 1]
    assert whole.tolist() == [0, 1, 2, 3]


def test_tied_weights_of_a_module():
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.Linear(3, 3)
            self.b = torch.nn.Linear(3, 3)
            self.b.weight = self.a.weight

    carried = Channel().carry(Tied())
    assert carried.a.weight is carried.b.weight
    state = Channel().carry(Tied().state_dict())
    assert state["a.weight"].data_ptr() == state["b.weight"].data_ptr()


def test_nothing_is_shared_between_values():
    tensor = torch.arange(4)
    channel = Channel()
    first, second = channel.carry([tensor]), channel.carry([tensor])
    first[0][0] = 9
    assert second[0].tolist() == [0, 1, 2, 3]
    # A tensor at the address of one that is gone must not be taken for it.
    for i in range(20):
        assert channel.carry([torch.full((4,), i)])[0].tolist() == [i] * 4


def test_closure_over_a_tensor_that_is_also_in_the_value():
    weight = torch.arange(3.0)

    class GraphDeployer:
        def run(self, x):
            return weight * x

    value = Channel().carry([weight, GraphDeployer(), lambda: weight])
    assert value[1].run(2).tolist() == [0, 2, 4]
    assert value[2]() is value[0]


def test_memory_of_a_tensor_without_numpy():
    tensor = torch.arange(4, dtype=torch.int32)
    memory = encoding._through_ctypes(tensor)
    assert memoryview(memory).nbytes == 16
    address = tensor.data_ptr()
    del tensor
    gc.collect()
    assert bytes(memory) == struct.pack("<4i", 0, 1, 2, 3)
    assert memory.tensor.data_ptr() == address


def test_torch_without_numpy():
    script = """
        import sys, warnings
        warnings.simplefilter("ignore")
        sys.modules["numpy"] = None
        import torch
        from codec_transport import Channel
        try:
            torch.empty(0).numpy()
        except RuntimeError:
            pass
        else:
            raise SystemExit("torch has NumPy")
        del sys.modules["numpy"]
        for shared in (False, True):
            channel = Channel(shared)
            for t in (
                torch.arange(6).reshape(2, 3), torch.ones(2, 3).t(), torch.tensor(1.5),
                torch.empty(0, 3), torch.ones(3, dtype=torch.bfloat16), torch.ones(2, requires_grad=True),
            ):
                for carried in (channel.carry(t), channel.carry([t])[0]):
                    assert torch.equal(carried, t) and carried.dtype == t.dtype
                    assert carried.requires_grad == t.requires_grad
        assert "numpy" not in sys.modules
    """
    run(script)


def test_reader_that_has_not_imported_torch():
    script = """
        import pickle, sys
        from conveyor.codec import frames as codec
        frame = pickle.load(sys.stdin.buffer)
        assert "torch" not in sys.modules and "numpy" not in sys.modules
        print(codec.decode(*frame).sum().item())
    """
    for value in (torch.arange(4), {"a": torch.arange(4)}):
        frame_codec, _, meta, buffers = codec.encode(value, None)
        frame = pickle.dumps((frame_codec, meta, [bytearray(b) for b in buffers]))
        code = script
        if isinstance(value, dict):
            code = code.replace("(*frame)", "(*frame)['a']")
        result = run(code, input=frame, capture_output=True)
        assert result.stdout.strip() == b"6"
