"""Values with tensors anywhere travel in frames and beside them, and what was promised of them is kept."""

import dataclasses

import pytest
from codec_transport import Channel
from hypothesis import example, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from conveyor import device as devices  # noqa: E402
from conveyor.codec import frames as codec  # noqa: E402
from conveyor.codec.out_of_band import OutgoingValue  # noqa: E402
from conveyor.codec.pickling.definitions import SentDefinitions  # noqa: E402
from conveyor.codec.promises import CheckedValue, PromiseChecker  # noqa: E402
from conveyor.exceptions import SerializationError, TransportError  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::UserWarning")]


@dataclasses.dataclass
class Holder:
    inside: object


DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float8_e5m2,
    torch.int64,
    torch.bool,
    torch.complex64,
]


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    count = torch.Size(shape).numel()
    numbers = torch.tensor(draw(st.lists(st.integers(0, 9), min_size=count, max_size=count)))
    made = numbers.to(torch.float32).to(dtype).reshape(shape)
    how = draw(
        st.sampled_from(["as it is", "turned", "every other", "expanded", "conjugate", "view"])
    )
    if how == "turned":
        made = made.permute(tuple(reversed(range(made.ndim))))
    elif how == "every other" and made.ndim:
        made = made[::2]
    elif how == "expanded":
        made = made.expand(2, *made.shape)
    elif how == "conjugate":
        made = made.conj()
    elif how == "view" and made.ndim and made.shape[0]:
        made = made[1:]
    if dtype.is_floating_point and draw(st.booleans()):
        made = made.detach().requires_grad_()
        if draw(st.booleans()):
            made = torch.nn.Parameter(made)
    return made


values = st.recursive(
    st.one_of(tensors(), st.integers(), st.text(max_size=3), st.none()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.builds(Holder, inner),
    ),
    max_leaves=8,
)


def once(tensor):
    """Which dimensions are expanded."""
    return [stride == 0 and n > 1 for n, stride in zip(tensor.shape, tensor.stride(), strict=True)]


def check_same(got, wanted):
    assert type(got) is type(wanted)
    if isinstance(wanted, torch.Tensor):
        assert (got.dtype, got.shape, got.requires_grad) == (
            wanted.dtype,
            wanted.shape,
            wanted.requires_grad,
        )
        assert got.is_leaf
        assert not got.is_conj()
        plain = torch.float32 if wanted.dtype.itemsize == 1 else wanted.dtype
        assert torch.equal(got.detach().to(plain), wanted.detach().to(plain))
        if wanted.numel() > 1:
            assert once(got) == once(wanted)
    elif isinstance(wanted, Holder):
        check_same(got.inside, wanted.inside)
    elif isinstance(wanted, dict):
        assert list(got) == list(wanted)
        for key in wanted:
            check_same(got[key], wanted[key])
    elif isinstance(wanted, (list, tuple)):
        assert len(got) == len(wanted)
        for one, other in zip(got, wanted, strict=True):
            check_same(one, other)
    else:
        assert got == wanted


def checker(device=None, static=False, direct=False, **options):
    return PromiseChecker("a.f", device, static, direct, **options)


def carried_beside(value, by=None):
    moved = []
    outgoing = OutgoingValue(
        value, lambda _: None, lambda made: bytes(moved.extend(made) or b""), by
    )
    number, _, meta, buffers = codec.encode(outgoing, SentDefinitions())
    copies = [bytearray(memoryview(b).cast("B")) for b in buffers or ()]
    head = codec.decode(number, meta, copies)
    assert all(tensor.is_contiguous() for tensor in moved)
    return head.open([tensor.clone() for tensor in moved])


@given(values, st.booleans())
@settings(deadline=None, max_examples=150)
def test_values_with_tensors_travel(value, shared):
    check_same(Channel(shared).carry(value), value)
    check_same(carried_beside(value), value)


@given(values)
@example(torch.zeros((), dtype=torch.complex64).conj())
@settings(deadline=None, max_examples=100)
def test_the_same_value_again_keeps_any_promise(value):
    static = checker(static=True)
    for again in (value, Channel().carry(value)):
        check_same(Channel().carry(static.pack(again)), value)
    check_same(carried_beside(value, checker(static=True)), value)


class Host(type("Rest", (devices.Device,), dict.fromkeys(devices.Device.__abstractmethods__))):
    kind = "host"

    def viable(self):
        return None

    def current_index(self):
        return 0

    def empty(self, nbytes, index=None):
        return torch.empty(nbytes, dtype=torch.uint8)

    def empty_pinned(self, nbytes):
        return torch.empty(nbytes, dtype=torch.uint8)

    def copy(self, target, source):
        target.copy_(source)


@given(values)
@settings(deadline=None, max_examples=100)
def test_tensors_that_are_put_on_a_device_are_the_same(value):
    """With the CPU for that device, since it is the one that is everywhere; by the way of the others."""
    devices.register(Host())
    try:
        packed = PromiseChecker("a.f", "host", False, False).pack(value)
        assert type(packed) is CheckedValue
        check_same(Channel(shared=True).carry(packed), value)
    finally:
        devices.unregister("host")


def test_a_value_that_breaks_a_promise_takes_its_definitions_back():
    class Local:
        def __init__(self, tensor):
            self.tensor = tensor

    static, channel = checker(static=True), Channel()
    first = channel.carry(static.pack(Local(torch.ones(2))))
    assert first.tensor.tolist() == [1, 1]
    for _ in range(2):
        with pytest.raises(TransportError, match=r"a\.f: _static_shape"):
            channel.carry(static.pack(Local(torch.ones(3))))
        with pytest.raises(SerializationError):
            channel.carry(static.pack([Local(torch.ones(2)), (n for n in ())]))
    again = channel.carry(static.pack(Local(torch.ones(2))))
    assert type(again) is type(first)


def test_what_is_compared():
    static = checker(static=True)
    static.pack(torch.ones(2, 3))
    static.pack(torch.zeros(3, 2).t())
    static.pack(torch.ones(1).expand(2, 3))
    for other, said in (
        (torch.ones(2, 3, dtype=torch.float64), "float64"),
        (torch.ones(3, 2), r"shape \[3, 2\]"),
        (torch.ones(6), r"shape \[6\]"),
    ):
        with pytest.raises(TransportError, match=said):
            static.pack(other)
    nothing = checker(static=True)
    codec.encode(nothing.pack({"no": "tensor"}), None)
    with pytest.raises(TransportError, match="of which there were 0, and got 1"):
        codec.encode(nothing.pack({"one": torch.ones(1)}), None)


def test_what_need_not_be_looked_at_is_sent_as_it_is(monkeypatch):
    value = {"a": torch.ones(1)}
    assert checker().pack(value) is value
    monkeypatch.setattr(devices, "in_use", lambda: False)
    assert checker("cpu").pack(value) is value
    monkeypatch.setattr(devices, "in_use", lambda: True)
    assert type(checker("cpu").pack(value)) is CheckedValue
    assert checker(direct=True, static=True).pack(value["a"]) is value["a"]
    bundled = (value["a"],)
    assert checker(direct=True, bundled=True).pack(bundled) is bundled
    with pytest.raises(TransportError, match="promises one tensor, and got None"):
        checker(direct=True, bundled=True).pack((None,))
