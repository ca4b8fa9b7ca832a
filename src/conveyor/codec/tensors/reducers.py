"""Torch tensors and storages inside of other values; those of devices go by way of the host's memory.

Within one value a tensor that lies in an earlier one's memory still does so at the reader; in other cases
each has memory of its own.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from conveyor.codec.encoded import SENT, Reducer
from conveyor.codec.tensors.encoding import (
    alias,
    dense,
    is_dense,
    is_plain,
    lies_here,
    lies_within,
    make_describe,
    make_header,
    make_memory,
    plain_values,
    rebuild,
    shaped,
    widest,
)
from conveyor.codec.tensors.staging import (
    STAGED,
    Staged,
    check,
    fetch_bytes,
    fetched,
    moved_to,
    target_device,
)
from conveyor.device import Device
from conveyor.storages import check_storage

if TYPE_CHECKING:
    import torch


def reduce_sparse(tensor: torch.Tensor) -> Any:
    """Reduce a sparse tensor to its parts; ``None`` for another layout."""
    import torch

    plain = tensor.detach()
    parts: tuple[torch.Tensor, ...]
    if plain.layout is torch.sparse_coo:
        parts = plain._indices(), plain._values()
        coalesced = plain.is_coalesced()
    else:
        coalesced = False
        if plain.layout in (torch.sparse_csr, torch.sparse_bsr):
            parts = plain.crow_indices(), plain.col_indices(), plain.values()
        elif plain.layout in (torch.sparse_csc, torch.sparse_bsc):
            parts = plain.ccol_indices(), plain.row_indices(), plain.values()
        else:
            return None
    layout = str(plain.layout).removeprefix("torch.")
    return _rebuild, (layout, tuple(plain.shape), coalesced, tensor.requires_grad, *parts)


def _rebuild(
    layout: str, shape: tuple[int, ...], coalesced: bool, requires_grad: bool, *parts: torch.Tensor
) -> torch.Tensor:
    import torch

    # They were valid where they came from, and to check that again reads all of them.
    if len(parts) == 2:
        made = torch.sparse_coo_tensor(
            *parts, size=shape, check_invariants=False, is_coalesced=coalesced
        )
    else:
        kind = getattr(torch, layout)
        made = torch.sparse_compressed_tensor(
            *parts, size=shape, layout=kind, check_invariants=False
        )
    return made.requires_grad_(requires_grad)


#: Notes on the value that is pickled: by a storage's address, the tensor that has brought most of it.
Notes = dict[Any, Any]
#: Function that exports a tensor's memory, for a pickle.
_Export = Callable[["torch.Tensor"], pickle.PickleBuffer]


def make_reducers(notes: Notes) -> dict[type, Reducer]:
    """The reducers of the pickler that has these notes."""
    import torch

    export = _make_export(notes)
    # Storages for what torch itself reduces to them: tensor subclasses, sparse tensors.
    return {
        torch.Tensor: _make_tensor_reducer(notes, export),
        torch.UntypedStorage: _make_storage_reducer(notes, export),
        torch.storage.TypedStorage: _reduce_typed_storage,
    }


def _make_tensor_reducer(notes: Notes, export: _Export) -> Reducer:
    import torch

    describe_usual, describe_any = make_describe()

    def reduce_tensor(tensor: torch.Tensor) -> Any:
        sent = notes.get(SENT)  # none while something is defined by value
        if sent is None or (sent.collected is None and sent.checker is None):
            described = describe_usual(tensor)
            if described is not None:
                header, memory, storage = described
                if notes.setdefault(storage, tensor) is not tensor:
                    aliased = _alias_of(tensor, storage, True, notes)
                    if aliased is not None:
                        return aliased
                return rebuild, (header, pickle.PickleBuffer(memory))
        return reduce_any(tensor, sent)

    def reduce_any(tensor: torch.Tensor, sent: Any) -> Any:
        # What travels beside the frame, if any does; and who knows what was promised, if anything was.
        collected, checker = (None, None) if sent is None else (sent.collected, sent.checker)
        if checker is not None:
            checker.note(tensor)
        if (
            collected is not None
            and is_plain(tensor)
            and tensor.numel()
            and collected.wants(tensor)
        ):
            return collected.take(tensor)
        if (checker is not None or not tensor.is_cpu) and is_plain(tensor):
            target = tensor.device.type if checker is None else checker.target(tensor)
            if target != "cpu" or not tensor.is_cpu:
                return _reduce_placed(tensor, target, notes, export)
        if is_plain(tensor) and not tensor.is_contiguous() and lies_here(tensor):
            # It may lie in another one, and is copied only if it does not.
            check_storage(tensor)
            aliased = _alias_of(tensor, tensor.untyped_storage().data_ptr(), False, notes)
            if aliased is not None:
                return aliased
        described = describe_usual(tensor) or describe_any(tensor)
        if described is None:
            if tensor.layout is not torch.strided and not tensor.__dict__:
                return reduce_sparse(tensor) or tensor.__reduce_ex__(5)
            if tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_nested:
                # Torch sends the storage as it is, and a reader would enlarge it.
                check_storage(tensor)
            return tensor.__reduce_ex__(5)
        header, memory, storage = described
        if memory is None:
            return rebuild, (header, None)
        if storage and (aliased := _alias_of(tensor, storage, True, notes)) is not None:
            return aliased
        return rebuild, (header, pickle.PickleBuffer(memory))

    return reduce_tensor


def _alias_of(tensor: torch.Tensor, address: int, sent_whole: bool, notes: Notes) -> Any:
    """Reduce a tensor that lies in an earlier one of the value, in the storage at ``address``; ``None``: it
    does not, but what comes later may lie in it if it is ``sent_whole``, as it lies here."""
    first = notes.setdefault(address, tensor) if sent_whole else notes.get(address)
    if first is None or first is tensor:
        return None
    offset = tensor.data_ptr() - first.data_ptr()
    if not lies_within(tensor, first, offset):
        if sent_whole:
            notes[address] = widest(first, tensor)
        return None
    return _alias(tensor, first, offset)


def _alias(tensor: torch.Tensor, first: torch.Tensor, offset: int) -> Any:
    shape, strides = tuple(tensor.shape), tensor.stride()
    return alias, (first, tensor.dtype, offset, shape, strides, tensor.requires_grad)


def _reduce_placed(tensor: torch.Tensor, target: str, notes: Notes, export: _Export) -> Any:
    """Reduce a tensor that is on another device here, or is to be there, by way of the host's memory."""
    check(tensor)
    check_storage(tensor)
    storage = str(tensor.device), tensor.untyped_storage().data_ptr()
    first = notes.setdefault(storage, tensor)
    if first is not tensor and tensor.numel():
        offset = tensor.data_ptr() - first.data_ptr()
        if is_dense(first) and lies_within(tensor, first, offset):
            return _alias(tensor, first, offset)
        if is_dense(tensor):
            notes[storage] = widest(first, tensor)
    memory, strides = dense(plain_values(tensor))
    header = make_header(tensor.dtype, tuple(tensor.shape), strides, tensor.requires_grad)
    buffer = export(memory) if memory.numel() else None
    if target == "cpu":
        return rebuild, (header, buffer)
    return _rebuild_on, (header, buffer, *target_device(tensor, target))


def _make_export(notes: Notes) -> _Export:
    memory_of = make_memory()

    def export(contiguous: torch.Tensor) -> pickle.PickleBuffer:
        if contiguous.is_cpu:
            return pickle.PickleBuffer(memory_of(contiguous))
        later = _staged(notes)
        if later is not None:
            return later.buffer(contiguous)
        return fetched(contiguous)

    return export


def _staged(notes: Notes) -> Staged | None:
    """Return the ``Staged`` that is finished before the buffers are read; ``None``: they are read at once."""
    sent = notes.get(SENT)
    if sent is None or sent.in_band:
        return None
    found: Staged | None = notes.get(STAGED)
    if found is None:
        # Whoever has readers sends what it pickles in a frame.
        found = notes[STAGED] = Staged(framed=bool(sent.readers))
    return found


def _make_storage_reducer(notes: Notes, export: _Export) -> Reducer:
    import torch

    def reduce_storage(storage: torch.UntypedStorage) -> Any:
        sent = notes.get(SENT)
        checker = None if sent is None else sent.checker
        if checker is not None:
            checker.note_storage(storage)
        check(storage)
        target = storage.device.type if checker is None else checker.target(storage)
        where = target_device(storage, target) if target != "cpu" else ()
        if not storage.nbytes():
            return _rebuild_storage, (None, *where)
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return _rebuild_storage, (export(whole), *where)

    return reduce_storage


def _reduce_typed_storage(storage: torch.storage.TypedStorage) -> Any:
    return _rebuild_typed_storage, (storage._untyped_storage, storage.dtype)


def _rebuild_on(header: bytes, buffer: Any, device: Device, identity: str | None) -> torch.Tensor:
    there = None if buffer is None else fetch_bytes(buffer, device, identity)
    if there is not None:
        return shaped(header, there)
    made = rebuild(header, buffer)
    return moved_to(made.detach(), device, identity).requires_grad_(made.requires_grad)


def _rebuild_storage(
    buffer: Any, device: Device | None = None, identity: str | None = None
) -> torch.UntypedStorage:
    import torch

    there = None
    if buffer is not None and device is not None:
        there = fetch_bytes(buffer, device, identity)
    if there is not None:
        return there.untyped_storage()
    if buffer is None:
        made = torch.empty(0, dtype=torch.uint8)
    else:
        made = torch.frombuffer(buffer, dtype=torch.uint8)
    return (made if device is None else moved_to(made, device, identity)).untyped_storage()


def _rebuild_typed_storage(storage: Any, dtype: torch.dtype) -> Any:
    import torch

    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)
