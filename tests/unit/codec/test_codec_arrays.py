import gc
import pickle
import weakref

import pytest
from codec_transport import Channel
from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor.codec import frames as codec
from conveyor.exceptions import SerializationError

np = pytest.importorskip("numpy")
hnp = pytest.importorskip("hypothesis.extra.numpy")

codec.encode({}, None)  # NumPy is here: from now on the codec knows

dtypes = (
    hnp.boolean_dtypes()
    | hnp.integer_dtypes(endianness="?")
    | hnp.unsigned_integer_dtypes(endianness="?")
    | hnp.floating_dtypes(endianness="?", sizes=(16, 32, 64))
    | hnp.complex_number_dtypes(endianness="?", sizes=(64, 128))
    | hnp.datetime64_dtypes(endianness="?")
    | hnp.timedelta64_dtypes(endianness="?")
    | hnp.byte_string_dtypes(max_len=4)
    | hnp.unicode_string_dtypes(max_len=4)
)
dtypes = dtypes | hnp.array_dtypes(dtypes, max_size=3) | hnp.nested_dtypes(dtypes, max_leaves=4)
arrays = hnp.arrays(dtypes, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))


def check_same(carried, array):
    assert type(carried) is np.ndarray
    assert carried.dtype == array.dtype
    assert carried.shape == array.shape
    assert carried.tobytes() == array.tobytes()


@given(arrays, st.randoms(use_true_random=False), st.booleans())
@settings(deadline=None, max_examples=300)
def test_any_array_survives(array, random, shared):
    axes = list(range(array.ndim))
    random.shuffle(axes)
    array = array.transpose(axes)
    if random.random() < 0.3:
        array = array[..., ::-1] if array.ndim else array
    channel = Channel(shared)
    carried = channel.carry(array)
    check_same(carried, array)
    assert carried.flags.writeable
    inside = channel.carry({"a": [array], "b": 1})["a"][0]
    check_same(inside, array)
    assert inside.flags.writeable


@pytest.mark.parametrize("order", ["C", "F"])
def test_order_is_kept_and_nothing_is_copied(order):
    array = np.arange(12.0).reshape(3, 4, order=order)
    frame = codec.encode(array, None)
    assert frame[0] == codec.ARRAY
    (buffer,) = frame[3]
    assert np.shares_memory(buffer, array)
    carried = Channel().carry(array)
    assert carried.flags[f"{order}_CONTIGUOUS"]
    (buffer,) = codec.encode([array], None)[3]
    assert np.shares_memory(np.asarray(buffer), array)


def test_the_array_holds_the_buffer():
    channel = Channel()
    frame = channel.send(np.arange(10))
    held = weakref.ref(frame[3][0])
    array = channel.receive(frame)
    del frame
    part = array[2:4]
    del array
    gc.collect()
    assert held() is not None
    assert part.tolist() == [2, 3]
    del part
    gc.collect()
    assert held() is None


@pytest.mark.parametrize("wrap", [lambda a: a, lambda a: {"a": a}], ids=["alone", "inside"])
def test_read_only_depends_on_the_reader_alone(wrap):
    array = np.arange(10)
    array.flags.writeable = False
    carried = Channel(shared=False).carry(wrap(array))
    carried = carried["a"] if isinstance(carried, dict) else carried
    carried[0] = 5
    assert array[0] == 0
    from_bytes = np.frombuffer(b"12345678", "i8")
    carried = Channel(shared=False).carry(wrap(from_bytes))
    carried = carried["a"] if isinstance(carried, dict) else carried
    assert carried.flags.writeable
    assert carried.tobytes() == b"12345678"


def test_structured_dtype_keeps_offsets_and_titles():
    dtype = np.dtype(
        {"names": ["a", "b"], "formats": ["i1", "f8"], "offsets": [3, 8], "itemsize": 32}
    )
    array = np.zeros(4, dtype)
    array["b"] = 1.5
    carried = Channel().carry(array)
    assert carried.dtype == dtype
    assert carried.dtype.itemsize == 32
    assert carried["b"].tolist() == [1.5] * 4


@pytest.mark.parametrize(
    "array",
    [
        np.array([{"a": 1}, None, [2]], dtype=object),
        np.array([[(1, "x")]], dtype=[("a", "i4"), ("b", object)]),
        np.ma.masked_array([1, 2], [True, False]),
        np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        np.zeros(3, "V0"),
        np.zeros((2, 0, 3), order="F"),
        np.array("text"),
        np.array(b"", "S"),
    ],
    ids=["object", "object field", "masked", "record", "V0", "empty", "0-d", "S0"],
)
def test_other_arrays(array):
    for carried in (Channel().carry(array), Channel().carry([array])[0]):
        assert type(carried) is type(array)
        assert carried.dtype == array.dtype
        assert carried.shape == array.shape
        assert carried.tolist() == array.tolist()


@pytest.mark.skipif(not hasattr(np.dtypes, "StringDType"), reason="NumPy 2")
def test_string_dtype():
    array = np.array(["a", "bb" * 50], dtype=np.dtypes.StringDType())
    assert Channel().carry(array).tolist() == array.tolist()


def test_unpicklable_element():
    with pytest.raises(SerializationError):
        Channel().send(np.array([iter, (x for x in ())], dtype=object))


SCALARS = [
    np.bool_(True),
    np.float16(1.5),
    np.float32(0.1),
    np.float64(0.1),
    np.longdouble(0.1),
    np.complex64(1 + 2j),
    np.complex128(1 + 2j),
    np.clongdouble(1 + 2j),
    np.datetime64("2024-01-02T03", "h"),
    np.timedelta64(5, "ms"),
    np.str_("text"),
    np.bytes_(b"bytes"),
    np.void(b"void"),
    *(np.dtype(c).type(7) for c in "bBhHiIlLqQ"),
]


@pytest.mark.parametrize("scalar", SCALARS, ids=lambda s: type(s).__name__)
def test_scalars(scalar):
    for carried in (Channel().carry(scalar), Channel().carry([scalar])[0]):
        assert type(carried) is type(scalar)
        assert carried.dtype == scalar.dtype
        assert carried == scalar


@given(hnp.from_dtype(np.dtype("f4")) | hnp.from_dtype(np.dtype("f2")))
def test_float_scalars_are_exact(scalar):
    carried = Channel().carry(scalar)
    assert carried.tobytes() == scalar.tobytes() or np.isnan(scalar)


def test_arrays_inside_have_buffers_of_their_own():
    value = {"x": np.arange(1000), "y": [np.ones((10, 10))], "z": "text"}
    _, _, meta, buffers = codec.encode(value, None)
    assert len(buffers) == 2
    assert len(meta) < 500
    carried = Channel(shared=True).carry(value)
    assert (carried["x"] == value["x"]).all()
    assert carried["y"][0].flags.writeable


def test_other_exporters_go_out_of_band():
    class Exporter:
        def __init__(self, data):
            self.data = data

        def __reduce_ex__(self, protocol):
            return bytes, (pickle.PickleBuffer(self.data),)

    fortran = np.asfortranarray(np.arange(6).reshape(2, 3))
    carried = Channel().carry([Exporter(fortran)])
    assert carried == [fortran.T.tobytes()]


def test_more_shapes_than_the_cache_holds():
    channel = Channel()
    for i in range(5000):
        assert channel.carry(np.empty((0, i), "u1")).shape == (0, i)
