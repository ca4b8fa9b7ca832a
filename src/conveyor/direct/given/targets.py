"""Targets for the value of a ref, set before ``get``: which memory, or which device."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from conveyor.codec.direct import Unfetched, fetched
from conveyor.device import base as devices
from conveyor.direct.given.into import Targets
from conveyor.direct.given.into import receive as receive_into
from conveyor.direct.memory import is_tensor
from conveyor.direct.structure.leaves import is_leaf
from conveyor.direct.structure.objects import taken_apart
from conveyor.exceptions import SerializationError
from conveyor.refs.ref import Ref
from conveyor.refs.streams import StreamRef


def set_target_for_ref(ref: Ref, target: Any) -> None:
    """Have ``get`` and ``await`` of ``ref`` give the tensors and arrays of its value in memory that is there.
    ``conveyor.get(ref, into=...)`` does the same at once.

    They give the value with these very objects in it. Nothing holds them meanwhile: once one of them is
    garbage, the value is fetched into new memory. It holds for this object, not for what it is pickled to,
    and until this or :func:`set_target_device_for_ref` is called again.

    Args:
        target: a list of tensors or arrays, one for each in the value, in the order in which its pickler
            comes to them, also in objects. Whether they fit is looked at by ``get``, which raises
            ``ValueError`` before anything is written.

    Raises:
        TypeError: ``ref`` is no reference to one value, or ``target`` is no list of tensors and arrays.
    """
    _check_ref(ref)
    buffers = [target] if is_leaf(target) else target
    if isinstance(buffers, Mapping) or not isinstance(buffers, (list, tuple)):
        raise TypeError(f"a list of tensors or arrays is needed, not a {type(target).__name__}")
    for one in buffers:
        if not is_leaf(one):
            raise TypeError(f"a list of tensors or arrays is needed, and one is {one!r}")
    ref._targets = [weakref.ref(one) for one in buffers]


def set_target_device_for_ref(ref: Ref, device: Any) -> None:
    """Have ``get`` and ``await`` of ``ref`` give the tensors of its value on a device: ``"cpu"``,
    ``"cuda:0"``. It holds as long as :func:`set_target_for_ref` does.

    Raises:
        TypeError: ``ref`` is no reference to one value, or ``device`` does not name a device.
        ValueError: there is no such device in this process.
    """
    _check_ref(ref)
    ref._targets = checked_device(device)


def _check_ref(ref: Any) -> None:
    if not isinstance(ref, Ref) or isinstance(ref, StreamRef):
        raise TypeError(f"a reference to one value is needed, not a {type(ref).__name__}")


def checked_device(device: Any) -> str:
    """The device's name, as torch has it.

    Raises:
        TypeError: it names none.
        ValueError: there is no such device in this process.
    """
    import torch

    if not isinstance(device, (str, torch.device)):
        raise TypeError(f"a device is a name such as 'cuda:0', not {device!r}")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"there is no device {device!r}: {error}") from None
    if found.type == "cpu":
        return str(found)
    kind = devices.get(found.type)
    if kind is None:
        known = ", ".join(["cpu", *devices.kinds()])
        raise ValueError(f"there is no device {str(device)!r}; known are {known}")
    why_not = kind.viable()
    if why_not is not None:
        raise ValueError(f"there is no device {str(device)!r}: {why_not}")
    if found.index is not None and found.index >= kind.count():
        raise ValueError(
            f"there is no device {str(device)!r}: this process has {kind.count()} of that kind"
        )
    return str(found)


def receive(ref: Ref, targets: Any, timeout: float | None) -> Any:
    """Get the value of ``ref`` in the ``targets`` that were kept for it."""
    ref._settled(timeout)
    value = ref._unfetched()
    if isinstance(targets, str):
        return on_device(value, targets)
    buffers = [target() for target in targets]
    if any(one is None for one in buffers):
        return fetched(value)
    return receive_into(value, Targets(buffers, "the target of a ref"))


def on_device(value: Any, device: str) -> Any:
    """``value``, which may be elsewhere, with its tensors on ``device``.

    Raises:
        SerializationError: it has objects that cannot be pickled, whose tensors are not known.
    """
    is_here = not isinstance(value, Unfetched) or value.here() is not None
    apart = taken_apart(fetched(value), fresh=not is_here)
    if apart.unseen:
        raise SerializationError(
            f"the tensors of the value cannot be had on {device}: its objects cannot be pickled, and are "
            f"looked into in no other way ({apart.unseen})"
        )
    moved = {id(leaf): leaf.to(device) for _, leaf in apart.leaves if is_tensor(leaf)}
    return apart.put_together([moved.get(id(leaf), leaf) for _, leaf in apart.leaves])
