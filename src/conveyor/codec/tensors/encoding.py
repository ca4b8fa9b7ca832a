"""Torch tensors: a header and the raw memory, as for arrays; those of devices by way of the host's memory.

What arrives is a leaf with the same values, dtype, shape, strides (of a dense tensor) and
``requires_grad``. The autograd graph stays behind. A view brings the part that it views, not the
storage behind it. Within one value a tensor that lies in an earlier one's memory still does so at
the reader; in other cases each has memory of its own.
"""

from __future__ import annotations

import functools
import pickle
import struct
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from conveyor.codec.encoded import SENT, Encoded, Reducer
from conveyor.codec.tensors.headers import (
    EMPTY,
    REQUIRES_GRAD,
    STRIDED,
    fixed,
    make_header,
    shaped,
)
from conveyor.codec.tensors.layouts import (
    alias,
    dense,
    is_dense,
    is_plain,
    lies_here,
    lies_within,
    plain_values,
    widest,
)
from conveyor.codec.tensors.sparse import reduce_sparse
from conveyor.codec.tensors.staged import (
    STAGED,
    Staged,
    bring,
    bring_bytes,
    check,
    fetched,
    place_for,
)
from conveyor.device import Device
from conveyor.storages import check_storage

if TYPE_CHECKING:
    import torch

TENSOR = 19
"""Codec: a dense ``torch.Tensor`` on the CPU."""
_CACHED = 4096


@functools.cache
def _views() -> dict[torch.dtype, torch.dtype | None]:
    """For each dtype, the one to view it as so that NumPy can view that (``None``: as it is)."""
    import torch

    same_size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    views: dict[torch.dtype, torch.dtype | None] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some dtypes are experimental
        for dtype in {d for d in vars(torch).values() if isinstance(d, torch.dtype)}:
            if str(dtype).startswith("torch.q"):  # quantized: bytes are not all there is to it
                continue
            try:
                probe = torch.empty(0, dtype=dtype)
                try:
                    probe.numpy()
                    views[dtype] = None
                except TypeError:
                    probe.view(same_size[dtype.itemsize]).numpy()
                    views[dtype] = same_size[dtype.itemsize]
            except Exception:  # torch is without NumPy
                continue
    return views


def _make_memory() -> Callable[[torch.Tensor], Any]:
    """A function that exports a contiguous tensor's memory. The export keeps the tensor alive."""
    views = _views()

    def memory_of(tensor: torch.Tensor) -> Any:
        dtype = tensor.dtype
        if dtype in views:
            view = views[dtype]
            return (tensor if view is None else tensor.view(view)).numpy()
        return _through_ctypes(tensor)

    return memory_of


def _through_ctypes(tensor: torch.Tensor) -> Any:
    import ctypes

    size = tensor.numel() * tensor.element_size()
    memory = (ctypes.c_char * size).from_address(tensor.data_ptr())
    memory.tensor = tensor
    return memory


def _make_describe() -> Callable[[torch.Tensor], tuple[bytes, Any, bool] | None]:
    """A function from tensor to header, memory (``None``: it has none), and whether that is its own.

    It answers ``None`` to a tensor that a header cannot describe.
    """
    memory_of = _make_memory()
    views = _views()
    headers: dict[Any, bytes] = {}

    def describe(tensor: torch.Tensor) -> tuple[bytes, Any, bool] | None:
        dtype = tensor.dtype
        requires_grad = tensor.requires_grad
        if dtype not in views or tensor.__dict__:
            return describe_any(tensor)
        plain = tensor.detach() if requires_grad else tensor
        view = views[dtype]
        try:
            offset = plain.storage_offset()
            needs = plain.nbytes + (offset and offset * dtype.itemsize)
            if needs > plain.untyped_storage().nbytes():
                return describe_any(tensor)  # it is expanded, or its storage was freed
            # The common case: NumPy views a strided CPU tensor that is no conjugate.
            memory = (plain if view is None else plain.view(view)).numpy()
        except (RuntimeError, TypeError):
            return describe_any(tensor)
        if not memory.flags.c_contiguous or not memory.size:
            return describe_any(tensor)
        key = (dtype, memory.shape, requires_grad)
        header = headers.get(key)
        if header is None:
            if len(headers) >= _CACHED:
                headers.clear()
            header = headers[key] = make_header(dtype, memory.shape, None, requires_grad)
        return header, memory, True

    def describe_any(tensor: torch.Tensor) -> tuple[bytes, Any, bool] | None:
        requires_grad = tensor.requires_grad
        if not tensor.is_cpu or not is_plain(tensor):
            return None
        check_storage(tensor)
        shape = tuple(tensor.shape)
        contiguous, strides = dense(plain_values(tensor))
        header = make_header(tensor.dtype, shape, strides, requires_grad)
        if not contiguous.numel():
            return header, None, False
        return header, memory_of(contiguous), contiguous.data_ptr() == tensor.data_ptr()

    return describe


def make_encoder() -> Callable[[torch.Tensor], Encoded | None]:
    """An encoder for tensors; it answers ``None`` to one that is for the general pickler."""
    describe = _make_describe()

    def encode(tensor: torch.Tensor) -> Encoded | None:
        described = describe(tensor)
        if described is None:
            return None
        header, memory, _ = described
        return TENSOR, 0, header, None if memory is None else [memory]

    return encode


_read: dict[bytes, Callable[[Any], torch.Tensor]] = {}


def decode(meta: bytes, buffers: list[Any] | None) -> torch.Tensor:
    """The tensor over the buffer, without a copy.

    Torch has no read-only tensors: one over a read-only buffer gets private pages when written to.
    """
    return rebuild(meta, buffers[0] if buffers else None)


def rebuild(header: bytes, buffer: Any) -> torch.Tensor:
    maker = _read.get(header)
    if maker is None:
        if len(_read) >= _CACHED:
            _read.clear()
        maker = _read[header] = _make_maker(header)
    return maker(buffer)


def _make_maker(header: bytes) -> Callable[[Any], torch.Tensor]:
    import torch

    flags, length, ndim = fixed.unpack_from(header)
    end = fixed.size + length
    name = header[fixed.size : end].decode()
    dtype: torch.dtype = getattr(torch, name)
    shape = struct.unpack_from(f"<{ndim}q", header, end)
    strides = struct.unpack_from(f"<{ndim}q", header, end + 8 * ndim) if flags & STRIDED else None
    requires_grad = bool(flags & REQUIRES_GRAD)

    def empty(buffer: Any) -> torch.Tensor:
        if strides is None:
            made = torch.empty(shape, dtype=dtype)
        else:
            made = torch.empty_strided(shape, strides, dtype=dtype)
        return made.requires_grad_() if requires_grad else made

    def through_torch(buffer: Any) -> torch.Tensor:
        made = torch.frombuffer(_writable(buffer), dtype=dtype)
        made = made.view(shape) if strides is None else made.as_strided(shape, strides)
        return made.requires_grad_() if requires_grad else made

    if flags & EMPTY:
        return empty
    views = _views()
    if dtype not in views:
        return through_torch

    # Half as long as through torch alone, which makes its shape in a second step.
    import numpy as np

    view = views[dtype]
    numpy_dtype = torch.empty(0, dtype=view or dtype).numpy().dtype
    in_bytes = None if strides is None else tuple(s * numpy_dtype.itemsize for s in strides)
    from_numpy = torch.from_numpy
    new = np.ndarray

    def through_numpy(buffer: Any) -> torch.Tensor:
        made = from_numpy(new(shape, numpy_dtype, _writable(buffer), 0, in_bytes))
        if view is not None:
            made = made.view(dtype)
        return made.requires_grad_() if requires_grad else made

    return through_numpy


def _writable(buffer: Any) -> Any:
    """``buffer``, or the same memory so that it can be written to without anyone's seeing it."""
    try:
        if not buffer.readonly:
            return buffer
    except AttributeError:  # bytearray: in band
        return buffer
    try:
        return buffer.private()
    except AttributeError:  # memoryview: in band
        return bytearray(buffer)


# Inside other values.


def make_reducers(notes: dict[Any, Any]) -> dict[type, Reducer]:
    """``notes`` maps a storage's address to the tensor of the value that has brought most of it."""
    import torch

    describe = _make_describe()
    memory_of = _make_memory()

    def reduce_tensor(tensor: torch.Tensor) -> Any:
        sent = notes.get(SENT)  # none while something is defined by value
        # What travels beside the frame, if any does; and who knows what was promised, if anything was.
        collected, keeper = (None, None) if sent is None else (sent.collected, sent.keeper)
        if keeper is not None:
            keeper.note(tensor)
        if (
            collected is not None
            and is_plain(tensor)
            and tensor.numel()
            and collected.wants(tensor)
        ):
            return collected.take(tensor)
        if (keeper is not None or not tensor.is_cpu) and is_plain(tensor):
            target = tensor.device.type if keeper is None else keeper.target(tensor)
            if target != "cpu" or not tensor.is_cpu:
                return reduce_placed(tensor, target)
        if is_plain(tensor) and not tensor.is_contiguous() and lies_here(tensor):
            # It may lie in another one, and is copied only if it does not.
            check_storage(tensor)
            aliased = alias_of(tensor, False)
            if aliased is not None:
                return aliased
        described = describe(tensor)
        if described is None:
            if tensor.layout is not torch.strided and not tensor.__dict__:
                return reduce_sparse(tensor) or tensor.__reduce_ex__(5)
            if tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_nested:
                # Torch sends the storage as it is, and a reader would enlarge it.
                check_storage(tensor)
            return tensor.__reduce_ex__(5)
        header, memory, its_own = described
        if memory is None:
            return rebuild, (header, None)
        if its_own and (aliased := alias_of(tensor, True)) is not None:
            return aliased
        return rebuild, (header, pickle.PickleBuffer(memory))

    def alias_of(tensor: torch.Tensor, sent_whole: bool) -> Any:
        """Reduce a tensor that lies in an earlier one of the value; ``None``: it does not, but what
        comes later may lie in it if it is ``sent_whole``, as it lies here."""
        address = tensor.untyped_storage().data_ptr()
        first = notes.setdefault(address, tensor) if sent_whole else notes.get(address)
        if first is None or first is tensor:
            return None
        offset = tensor.data_ptr() - first.data_ptr()
        if not lies_within(tensor, first, offset):
            if sent_whole:
                notes[address] = widest(first, tensor)
            return None
        shape, strides = tuple(tensor.shape), tensor.stride()
        return alias, (first, tensor.dtype, offset, shape, strides, tensor.requires_grad)

    def reduce_placed(tensor: torch.Tensor, target: str) -> Any:
        """Of a tensor that is on another device here, or is to be there: by way of the host's memory."""
        check(tensor)
        check_storage(tensor)
        storage = str(tensor.device), tensor.untyped_storage().data_ptr()
        first = notes.setdefault(storage, tensor)
        if first is not tensor and tensor.numel():
            offset = tensor.data_ptr() - first.data_ptr()
            if is_dense(first) and lies_within(tensor, first, offset):
                shape, strides = tuple(tensor.shape), tensor.stride()
                return alias, (first, tensor.dtype, offset, shape, strides, tensor.requires_grad)
            if is_dense(tensor):
                notes[storage] = widest(first, tensor)
        memory, strides = dense(plain_values(tensor))
        header = make_header(tensor.dtype, tuple(tensor.shape), strides, tensor.requires_grad)
        buffer = None
        if memory.numel():
            buffer = buffer_of(memory)
        if target == "cpu":
            return rebuild, (header, buffer)
        return _rebuild_on, (header, buffer, *place_for(tensor, target))

    def staged() -> Staged | None:
        """What is finished before the buffers are read; ``None``: they are read at once."""
        sent = notes.get(SENT)
        if sent is None or sent.in_band:
            return None
        found: Staged | None = notes.get(STAGED)
        if found is None:
            # Whoever has readers sends what it pickles in a frame.
            found = notes[STAGED] = Staged(framed=bool(sent.readers))
        return found

    def buffer_of(contiguous: torch.Tensor) -> pickle.PickleBuffer:
        if contiguous.is_cpu:
            return pickle.PickleBuffer(memory_of(contiguous))
        later = staged()
        if later is not None:
            return later.buffer(contiguous)
        return fetched(contiguous)

    def reduce_storage(storage: torch.UntypedStorage) -> Any:
        sent = notes.get(SENT)
        keeper = None if sent is None else sent.keeper
        if keeper is not None:
            keeper.note_storage(storage)
        check(storage)
        target = storage.device.type if keeper is None else keeper.target(storage)
        where = place_for(storage, target) if target != "cpu" else ()
        if not storage.nbytes():
            return _rebuild_storage, (None, *where)
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return _rebuild_storage, (buffer_of(whole), *where)

    def reduce_typed_storage(storage: torch.storage.TypedStorage) -> Any:
        return _rebuild_typed_storage, (storage._untyped_storage, storage.dtype)

    # Storages for what torch itself reduces to them: tensor subclasses, sparse tensors.
    return {
        torch.Tensor: reduce_tensor,
        torch.UntypedStorage: reduce_storage,
        torch.storage.TypedStorage: reduce_typed_storage,
    }


def _rebuild_on(header: bytes, buffer: Any, device: Device, identity: str | None) -> torch.Tensor:
    there = None if buffer is None else bring_bytes(buffer, device, identity)
    if there is not None:
        return shaped(header, there)
    made = rebuild(header, buffer)
    return bring(made.detach(), device, identity).requires_grad_(made.requires_grad)


def _rebuild_storage(
    buffer: Any, device: Device | None = None, identity: str | None = None
) -> torch.UntypedStorage:
    import torch

    there = None
    if buffer is not None and device is not None:
        there = bring_bytes(buffer, device, identity)
    if there is not None:
        return there.untyped_storage()
    if buffer is None:
        made = torch.empty(0, dtype=torch.uint8)
    else:
        made = torch.frombuffer(_writable(buffer), dtype=torch.uint8)
    return (made if device is None else bring(made, device, identity)).untyped_storage()


def _rebuild_typed_storage(storage: Any, dtype: torch.dtype) -> Any:
    import torch

    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)
