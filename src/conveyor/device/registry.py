"""Registry of the kinds of device, by the name that torch has for them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from conveyor.device.base import Device

if TYPE_CHECKING:
    import torch

_registered: dict[str, Device] = {}

#: Ours, with their modules: imported when somebody asks for them.
_ours = {"cuda": "conveyor.device.cuda"}
_made: dict[str, Device] = {}

#: Names of what is no device with memory of its own.
_NOT_DEVICES = ("cpu", "meta", "default")
#: Other names of ours.
_ALIASES = {"gpu": "cuda"}


def register(device: Device) -> None:
    """Have ``device=`` hints, values and transports know a kind of device. It is enough to do so in the
    process that began the session: others are told with the first tensor of it that they get.

    Raises:
        TypeError: it is no :class:`Device`.
        ValueError: there is one of that kind, or the kind cannot be one.
    """
    if not isinstance(device, Device):
        raise TypeError(f"a conveyor.device.Device is registered, not {device!r}")
    kind = getattr(device, "kind", None)
    if not isinstance(kind, str) or not kind.isidentifier():
        raise TypeError(f"a {type(device).__name__} has no kind: its attribute 'kind' is {kind!r}")
    if kind in _NOT_DEVICES or kind in _ALIASES:
        raise ValueError(f"{kind!r} is no kind of device that can be registered")
    if kind in kinds():
        raise ValueError(f"there is a device of the kind {kind!r} already")
    _registered[kind] = device


def unregister(kind: str) -> None:
    """Take back what :func:`register` did, in this process.

    Raises:
        ValueError: nobody has registered a device of that kind.
    """
    if _registered.pop(kind, None) is None:
        raise ValueError(f"no device was registered of the kind {kind!r}")


def kinds() -> tuple[str, ...]:
    """List all kinds: ours, then those that were registered."""
    return (*_ours, *_registered)


def get(kind: str) -> Device | None:
    """Find the device of a kind, also by another name of it (``"gpu"``). ``None``: nobody has registered it,
    or it is the host."""
    kind = _ALIASES.get(kind, kind)
    found = _registered.get(kind) or _made.get(kind)
    if found is None and kind in _ours:
        found = _made.setdefault(kind, import_module(_ours[kind]).DEVICE)
    return found


def of(tensor: torch.Tensor) -> Device | None:
    """Find the device that a tensor lies on. ``None``: it is the host, or one that nobody has registered."""
    return get(tensor.device.type)


def in_use() -> bool:
    """Whether this process may have tensors of a device. It has imported torch."""
    return bool(_registered) or bool(sys.modules["torch"].cuda.is_initialized())


def adopt(kind: str, make: Callable[..., Device], arguments: tuple[Any, ...]) -> Device:
    """Find the device of a kind, or make and register it. Called where a device comes from another
    process."""
    found = get(kind)
    if found is None:
        made = make(*arguments)
        # Making it may have registered it.
        found = get(kind) or _registered.setdefault(kind, made)
    return found
