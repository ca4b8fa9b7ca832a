"""Refs inside arguments: their values are sent.

Where arguments are encoded (the channel's ``SentDefinitions.values``) a ref is pickled as its value, at
any depth. One whose value is not there yet ends the encoding before anything is sent; whoever encodes
waits for it and begins again. Everywhere else a ref is pickled as a token (``runtime.refs.imports``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from conveyor.channel import SENT, add_reducers
from conveyor.exceptions import SerializationError
from conveyor.runtime.refs.ref import Ref

T = TypeVar("T")


class RefNotThere(SerializationError):
    """``ref``, which is in an argument, has no value yet."""

    def __init__(self, ref: Ref) -> None:
        super().__init__(f"{ref!r} is not done: get it first, and send the value")
        self.ref = ref


class RefFailed(SerializationError):
    """A ref in an argument has ``error`` in place of a value."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


def value_of(ref: Ref) -> Any:
    """The value of a ref, without waiting."""
    if not ref.done():
        raise RefNotThere(ref)
    try:
        return ref.get()
    except Exception as error:
        raise RefFailed(error) from error


def when_there(attempt: Callable[[], T]) -> T:
    """What ``attempt`` returns, which is made again whenever a ref that it lacked is done."""
    while True:
        try:
            return attempt()
        except RefNotThere as missing:
            lacked = missing.ref
        wait_for(lacked)


def wait_for(ref: Ref) -> None:
    """Until ``ref`` is done, by getting it: that takes part in finding deadlocks."""
    try:
        ref.get()
    except Exception:  # its outcome, for who needs it; or a wait that would never end
        if not ref.done():
            raise


def _same(value: Any) -> Any:
    return value


def _make_reducers(notes: dict[Any, Any]) -> dict[type, Callable[[Any], Any]]:
    def reduce(ref: Ref) -> Any:
        sent = notes.get(SENT)
        if sent is not None and sent.values:
            return _same, (value_of(ref),)
        return ref.__reduce_ex__(5)

    return dict.fromkeys(_kinds(Ref), reduce)


def _kinds(kind: type) -> list[type]:
    kinds = [kind]
    below: list[type] = type.__subclasses__(kind)
    for derived in below:
        kinds += _kinds(derived)
    return kinds


def _by_value(ref: Ref) -> Any:
    return value_of(ref)


# How a part of an argument is taken where a ref stands in for the whole (dag.parts).
Ref.__conveyor_value__ = _by_value  # type: ignore[attr-defined]
add_reducers(_make_reducers)
