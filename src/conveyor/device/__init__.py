"""Devices that have memory and an order of work of their own, as the library needs them.

A :class:`Device` is one kind of them, ``"cuda"`` say, with all that there are of it. :func:`register` adds a
kind; :func:`get` finds one by the name that torch has for it, and :func:`of` the one that a tensor lies on.
CUDA's is there where torch is.
"""

from __future__ import annotations

from conveyor.device.base import Device, Event, Stream, get, in_use, kinds, of, register, unregister

__all__ = ["Device", "Event", "Stream", "get", "in_use", "kinds", "of", "register", "unregister"]
