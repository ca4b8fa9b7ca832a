"""Values whose tensors travel beside their frame: taken apart here, put together there."""

import pickle
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor.codec import SentDefinitions
from conveyor.codec.frames import decode, discard, encode
from conveyor.codec.out_of_band import OUTGOING, Head, OutgoingValue, TensorSpec
from conveyor.exceptions import SerializationError
from conveyor.testing.conformance import KINDS, difference, sample

torch = pytest.importorskip("torch")


@dataclass
class Holder:
    tensor: Any
    note: str = ""


class Way:
    """Takes what goes beside a frame."""

    def __init__(self, refuses=None, fails=None):
        self.refuses = refuses
        self.fails = fails
        self.tensors = None

    def accepts(self, tensor):
        return self.refuses

    def offer(self, tensors):
        if self.fails is not None:
            raise self.fails
        self.tensors = [tensor.clone() for tensor in tensors]
        return b"a note"

    def outgoing(self, value):
        return OutgoingValue(value, self.accepts, self.offer)


def there(value, sent=None):
    """Send ``value``, and give the head with what comes beside it."""
    way = Way()
    codec, _, meta, buffers = encode(way.outgoing(value), sent)
    assert codec == OUTGOING
    memory = None if buffers is None else [bytearray(buffer) for buffer in buffers]
    return decode(codec, meta, memory), way.tensors


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_value_comes_as_it_was(kind):
    head, out_of_band = there(sample(kind))
    assert head.note == b"a note"
    assert all(tensor.is_contiguous() for tensor in out_of_band)
    assert head.tensors == tuple(map(TensorSpec.of, out_of_band))
    assert difference(head.open(out_of_band), sample(kind)) == ""


def test_the_frame_holds_no_tensor():
    value = [torch.ones(100_000), {"deep": torch.zeros(50_000)}, "text"]
    _, _, meta, buffers = encode(Way().outgoing(value))
    assert not buffers
    assert len(meta) < 1000


shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
dtypes = st.sampled_from([torch.float32, torch.int64, torch.bfloat16, torch.bool, torch.complex64])


@st.composite
def tensors(draw):
    shape = draw(shapes)
    made = torch.arange(int(torch.Size(shape).numel())).reshape(shape).to(draw(dtypes))
    if made.ndim > 1 and draw(st.booleans()):
        made = made.permute(draw(st.permutations(range(made.ndim))))
    if made.ndim and draw(st.booleans()):
        made = made[..., :: draw(st.integers(1, 2))]
    if made.is_complex() and draw(st.booleans()):
        made = made.conj()
    if made.is_floating_point() and draw(st.booleans()):
        made = made.detach().requires_grad_()
    return made


values = st.recursive(
    tensors() | st.none() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.tuples(inner, inner)
        | inner.map(Holder)
    ),
    max_leaves=12,
)


def equal(got, wanted):
    if isinstance(wanted, Holder):
        return isinstance(got, Holder) and equal(got.tensor, wanted.tensor)
    if isinstance(wanted, (list, tuple)):
        return len(got) == len(wanted) and all(map(equal, got, wanted))
    if isinstance(wanted, dict):
        return got.keys() == wanted.keys() and all(equal(got[k], wanted[k]) for k in wanted)
    return difference(got, wanted) == ""


@settings(deadline=None)
@given(values)
def test_any_value_comes_as_it_was(value):
    head, out_of_band = there(value)
    assert equal(head.open(out_of_band), value)


def test_a_tensor_travels_once_however_often_it_is_in_the_value():
    base = torch.arange(10.0)
    head, out_of_band = there([base, base, {"again": base}, base[2:5], base.reshape(2, 5)[:, 1]])
    assert len(out_of_band) == 1
    first, second, third, part, column = head.open(out_of_band)
    assert first is second is third["again"]
    first[3] = 100
    assert part[1] == 100
    first[6] = 200
    assert column[1] == 200


def test_a_view_that_comes_before_what_it_views_brings_its_own():
    base = torch.arange(10.0)
    head, out_of_band = there([base[2:5], base])
    assert len(out_of_band) == 2
    assert [tensor.tolist() for tensor in head.open(out_of_band)] == [[2, 3, 4], list(range(10))]


def test_what_comes_behind_both_lies_in_the_larger_one():
    base = torch.arange(10.0)
    parts = [base[2:5], base, base[6:], base[3:5], base[::3]]
    head, out_of_band = there(parts)
    assert len(out_of_band) == 2
    first, whole, end, middle, thirds = head.open(out_of_band)
    whole.fill_(7)
    assert first.tolist() == [2, 3, 4]
    assert [set(part.tolist()) for part in (end, middle, thirds)] == [{7}] * 3


def test_classes_by_value_and_refs_of_the_same_frame_go_with_it():
    scope = {"__name__": "__main__", "Any": Any}
    exec("class Local:\n    def __init__(self, tensor): self.tensor = tensor", scope)
    sent = SentDefinitions()
    value = scope["Local"](torch.ones(3))
    scope["Local"].__module__ = "__main__"
    head, out_of_band = there(value, sent)
    assert head.open(out_of_band).tensor.tolist() == [1, 1, 1]
    assert sent.collected is None


def test_a_tensor_that_is_not_accepted_is_named():
    way = Way(refuses="cannot go by 'x': it is too heavy")
    sent = SentDefinitions()
    with pytest.raises(
        SerializationError, match=r"a tensor \(float32, shape \[2, 3\]\) cannot go by 'x'"
    ):
        encode(way.outgoing({"t": torch.ones(2, 3)}), sent)
    assert sent.collected is None
    # The channel is as good as before.
    assert encode([torch.ones(2)], sent)[0] != OUTGOING


def test_what_cannot_be_offered_is_not_sent():
    sent = SentDefinitions()
    with pytest.raises(OSError, match="no way"):
        encode(Way(fails=OSError("no way")).outgoing([torch.ones(2)]), sent)
    assert sent.collected is None


def test_other_tensors_than_were_announced_are_told():
    head, _ = there([torch.ones(2, 3), torch.ones(4)])
    two = torch.ones(2, 3)
    assert head.mismatch([two, torch.ones(4)]) is None
    for came, said in [
        ([two], "2 tensors were announced, and 1 came"),
        (
            [two, torch.ones(5)],
            "a tensor (float32, shape [4]) was announced, and a tensor (float32, shape [5])",
        ),
        (
            [two.double(), torch.ones(4)],
            "(float32, shape [2, 3]) was announced, and a tensor (float64",
        ),
        (None, "a list of tensors was announced, and a NoneType came"),
        ([two, 17], "was announced, and a int came"),
        ([two, torch.nn.Parameter(torch.ones(4))], "was announced, and a Parameter came"),
        ([two, torch.ones(4, device="meta")], "and a tensor (float32, shape [4], on meta) came"),
    ]:
        assert said in head.mismatch(came)
    with torch.inference_mode():
        made = torch.ones(4)
    assert "an inference tensor came" in head.mismatch([two, made])


def test_tensors_may_lie_anywhere_in_their_memory():
    matrix = torch.arange(12.0).reshape(3, 4)
    value = [torch.zeros(3), matrix, matrix[1], matrix.t(), matrix.view(torch.int32)[2]]
    head, out_of_band = there(value)
    flat = torch.cat([tensor.reshape(-1) for tensor in out_of_band])
    places, at = [], 0
    for tensor in out_of_band:
        places.append(flat[at : at + tensor.numel()].view(tensor.shape))
        at += tensor.numel()
    assert equal(head.open(places), value)
    # Nor does it matter how they are laid out.
    strided = [
        tensor.t().contiguous().t() if tensor.ndim == 2 else tensor for tensor in out_of_band
    ]
    assert equal(head.open(strided), value)


def test_a_tensor_without_memory_of_its_own_is_one_of_zeros():
    zeros = torch._efficientzerotensor(3)
    head, out_of_band = there([zeros, torch.ones(2)])
    assert head.open(out_of_band)[0].tolist() == [0, 0, 0]


def test_a_frame_that_nobody_opens_can_be_discarded():
    _, flags, meta, _ = encode(Way().outgoing([torch.ones(2)]))
    assert flags == 0
    head = decode(OUTGOING, meta)
    assert isinstance(head, Head)
    head.give_up()


def test_the_definitions_of_a_frame_are_known_though_it_is_never_opened():
    scope = {"__name__": "__main__"}
    exec("class Shape: sides = 4", scope)
    sent = SentDefinitions()
    there([torch.ones(1), scope["Shape"]], sent)
    codec, _, meta, buffers = encode(scope["Shape"], sent)
    assert decode(codec, meta, buffers).sides == 4
    codec, flags, meta, _ = encode(
        Way().outgoing([torch.ones(1), scope["Shape"]]), SentDefinitions()
    )
    assert flags
    discard(meta)
    assert pickle.loads(pickle.dumps(codec)) == OUTGOING
