"""NumPy arrays: a header and the raw memory.

A header packs dtype, shape and order. Headers repeat, so both sides look them up in a cache.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from conveyor.codec.encoded import Encoded, Reducer

if TYPE_CHECKING:
    import numpy as np

ARRAY = 18
"""Codec: an ``numpy.ndarray`` of a plain dtype."""

_CACHED = 4096

_C, _F = 0, 1
_AS_IS, _AS_BYTES, _EMPTY, _NOT_PLAIN = range(4)

_fixed = struct.Struct("<BBBxI")  # order, whether the dtype is pickled, ndim, length of dtype


def _make_header(dtype: np.dtype[Any], shape: tuple[int, ...], order: int) -> tuple[bytes, int]:
    """The header, and how the memory is to be handed out."""
    import numpy as np

    if dtype.hasobject:
        return b"", _NOT_PLAIN
    name = dtype.str
    if dtype.names is None and dtype.subdtype is None and np.dtype(name) == dtype:
        described, pickled = name.encode(), False
    else:
        described, pickled = pickle.dumps(dtype, 5), True
        if pickle.loads(described) != dtype:
            return b"", _NOT_PLAIN
    how = _AS_IS if dtype.kind in "?bBiufc" else _AS_BYTES  # NumPy exports no datetime64, say
    if dtype.itemsize == 0 or 0 in shape:
        how = _EMPTY
    fixed = _fixed.pack(order, pickled, len(shape), len(described))
    return fixed + described + struct.pack(f"<{len(shape)}q", *shape), how


def _read_header(header: bytes) -> tuple[tuple[int, ...], np.dtype[Any], str]:
    import numpy as np

    order, pickled, ndim, length = _fixed.unpack_from(header)
    end = _fixed.size + length
    described = header[_fixed.size : end]
    dtype = pickle.loads(described) if pickled else np.dtype(described.decode())
    return struct.unpack_from(f"<{ndim}q", header, end), dtype, "CF"[order]


def shape_of(header: bytes) -> tuple[tuple[int, ...], int] | None:
    """The shape that a header describes, and the bytes of an element; ``None`` if the elements do not lie
    in the order of C."""
    shape, dtype, order = _read_header(header)
    return (shape, dtype.itemsize) if order == "C" else None


def describes(header: bytes, array: np.ndarray[Any, Any]) -> bool:
    """Whether a header is of an array of this one's dtype and shape, in the order of C."""
    shape, dtype, order = _read_header(header)
    return order == "C" and shape == array.shape and dtype == array.dtype


def with_shape(header: bytes, shape: tuple[int, ...]) -> bytes:
    """A header that describes another shape of the same dtype, in the order of C."""
    order, pickled, _, length = _fixed.unpack_from(header)
    described = header[_fixed.size : _fixed.size + length]
    fixed = _fixed.pack(order, pickled, len(shape), length)
    return fixed + described + struct.pack(f"<{len(shape)}q", *shape)


def _make_describe() -> Callable[[np.ndarray[Any, Any]], tuple[bytes, Any]]:
    """A function from array to header and memory (``None``: it has none); ``b""``: not plain."""
    import numpy as np

    cache: dict[tuple[Any, tuple[int, ...], int], tuple[bytes, int]] = {}

    def describe(array: np.ndarray[Any, Any]) -> tuple[bytes, Any]:
        flags = array.flags
        order = _C
        memory = array
        if not flags.c_contiguous:
            if flags.f_contiguous:
                order = _F
                memory = array.T
            elif array.dtype.hasobject:
                return b"", None
            else:
                memory = np.ascontiguousarray(array)
        key = (array.dtype, array.shape, order)
        found = cache.get(key)
        if found is None:
            if len(cache) >= _CACHED:
                cache.clear()
            found = cache[key] = _make_header(*key)
        header, how = found
        if how == _AS_IS:
            return header, memory
        if how == _AS_BYTES:
            return header, memory.reshape(-1).view(np.uint8)
        return header, None

    return describe


def make_encoder() -> Callable[[np.ndarray[Any, Any]], Encoded | None]:
    """An encoder for arrays; it answers ``None`` to one that is for the general pickler."""
    describe = _make_describe()

    def encode(array: np.ndarray[Any, Any]) -> Encoded | None:
        header, memory = describe(array)
        if memory is not None:
            return ARRAY, 0, header, [memory]
        return (ARRAY, 0, header, None) if header else None

    return encode


_read: dict[bytes, tuple[Any, ...]] = {}
_new: Callable[..., Any] | None = None


def decode(meta: bytes, buffers: list[Any] | None) -> np.ndarray[Any, Any]:
    """The array over the buffer, without a copy."""
    return rebuild(meta, buffers[0] if buffers else None)


def rebuild(header: bytes, buffer: Any) -> np.ndarray[Any, Any]:
    global _new
    found = _read.get(header)
    if found is None:
        import numpy as np

        _new = np.ndarray
        if len(_read) >= _CACHED:
            _read.clear()
        shape, dtype, order = _read_header(header)
        found = _read[header] = (shape, dtype, 0, None, order)
    shape, dtype, offset, strides, order = found
    return _new(shape, dtype, buffer, offset, strides, order)  # type: ignore[misc,no-any-return]


# Inside other values. NumPy's own reducers are several times slower: they describe the dtype anew.


def make_reducers(notes: dict[Any, Any]) -> dict[type, Reducer]:
    import numpy as np

    describe = _make_describe()

    def reduce_array(array: np.ndarray[Any, Any]) -> Any:
        header, memory = describe(array)
        if memory is None:
            return (rebuild, (header, None)) if header else array.__reduce_ex__(5)
        if not memory.flags.writeable:
            # Pickle would make the copy read-only too. Whether it is depends on its readers alone.
            memory = np.asarray(_Writable(memory))
        return rebuild, (header, pickle.PickleBuffer(memory))

    reducers: dict[type, Reducer] = {np.ndarray: reduce_array}
    scalars: list[tuple[type, type]] = [(np.bool_, bool)]
    scalars += [(kind, int) for kind in np.sctypeDict.values() if issubclass(kind, np.integer)]
    scalars += [(kind, float) for kind in (np.float16, np.float32, np.float64)]
    scalars += [(kind, complex) for kind in (np.complex64, np.complex128)]
    for kind, plain in scalars:
        if kind is not np.timedelta64:
            reducers[kind] = _scalar_reducer(kind, plain)
    return reducers


def _scalar_reducer(kind: type, plain: type) -> Reducer:
    return lambda scalar: (kind, (plain(scalar),))


class _Writable:
    """An array's memory, announced as writable. Nothing writes to it: pickle only copies."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface
