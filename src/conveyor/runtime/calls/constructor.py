"""A constructor's call that can be made again: its arguments as they were sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from conveyor.channel import SentDefinitions
from conveyor.channel.codec import decode, encode
from conveyor.runtime.refs.ref import Ref
from conveyor.runtime.refs.values import RefFailed, RefNotThere

if TYPE_CHECKING:
    from conveyor.runtime.calls.links import Link

#: Arguments up to this size (bytes) are kept for every actor, so that graphs of it can be restarted;
#: larger ones only for an actor with ``max_restarts``.
KEPT_BYTES = 1 << 20

#: What tells a worker to make its instance: called with the class and its arguments, or with a
#: :class:`Constructor` and the values of the refs among them.
START = "__start__"


@dataclass(frozen=True, slots=True)
class Constructor:
    """The class and the arguments, encoded; picklable.

    ``refs``: the places (position or name) of arguments that are refs. Their values travel beside it.
    """

    codec: int
    meta: bytes
    buffers: tuple[bytearray, ...]
    refs: tuple[int | str, ...]

    def start(self, link: Link) -> Any:
        """Send it to an actor that has no instance yet; the call's ref."""
        return link.call(START, (self,), {})

    def call(self, values: tuple[Any, ...]) -> tuple[type, tuple[Any, ...], dict[str, Any]]:
        """The class and its arguments; ``values``: those of ``refs``, in order."""
        cls, args, kwargs = decode(self.codec, self.meta, list(self.buffers))
        args = list(args)
        for place, value in zip(self.refs, values, strict=True):
            if isinstance(place, int):
                args[place] = value
            else:
                kwargs[place] = value
        return cls, tuple(args), kwargs


@dataclass(frozen=True, slots=True)
class Kept:
    """A constructor with the refs among its arguments, as whoever may have to send it keeps it.

    ``constructor`` is ``None`` where a ref inside of an argument had no value yet: then
    ``made_of`` is the class with the arguments as they were given.
    """

    constructor: Constructor | None
    refs: tuple[Ref, ...]
    made_of: tuple[type, tuple[Any, ...], dict[str, Any]] | None = None

    def start(self, link: Link) -> Any:
        """Send it to an actor that has no instance yet; the call's ref."""
        if self.made_of is not None:
            cls, args, kwargs = self.made_of
            return link.call(START, (cls, *args), kwargs)
        return link.call(START, (self.constructor, *self.refs), {})

    def call(self) -> tuple[type, tuple[Any, ...], dict[str, Any]]:
        """The class and its arguments; gets refs among them."""
        kept: Kept | None = self
        while kept is not None and kept.made_of is not None:
            try:
                kept = _snapshot(*kept.made_of, always=True)
            except RefNotThere as missing:
                missing.ref.get()
            except RefFailed as failed:
                raise failed.error from None
        assert kept is not None
        assert kept.constructor is not None
        return kept.constructor.call(tuple(ref.get() for ref in kept.refs))


def keep(cls: type, args: tuple[Any, ...], kwargs: Mapping[str, Any], always: bool) -> Kept | None:
    """A snapshot of the call ``cls(*args, **kwargs)``; ``None`` if it is large and not ``always``
    wanted. ``SerializationError`` if it cannot be sent."""
    try:
        return _snapshot(cls, args, kwargs, always)
    except (RefNotThere, RefFailed):
        return Kept(None, (), (cls, args, dict(kwargs)))


def _snapshot(
    cls: type, args: tuple[Any, ...], kwargs: Mapping[str, Any], always: bool
) -> Kept | None:
    """Refs that are arguments are kept as such, those inside of arguments as their values; raises
    ``RefNotThere`` or ``RefFailed`` for one of these."""
    found: dict[int | str, Ref] = {i: a for i, a in enumerate(args) if isinstance(a, Ref)}
    found.update((k, v) for k, v in kwargs.items() if isinstance(v, Ref))
    plain = tuple(None if i in found else a for i, a in enumerate(args))
    named = {k: None if k in found else v for k, v in kwargs.items()}
    codec, _flags, meta, buffers = encode((cls, plain, named), SentDefinitions(values=True))
    views = [memoryview(b).cast("B") for b in buffers or ()]
    if not always and len(meta) + sum(view.nbytes for view in views) > KEPT_BYTES:
        return None
    constructor = Constructor(codec, meta, tuple(map(bytearray, views)), tuple(found))
    return Kept(constructor, tuple(found.values()))
