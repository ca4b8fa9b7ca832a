"""The arguments of a call that waits for its turn, the refs among them, and the error if one has no value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from conveyor import _core
from conveyor.callers import Site, users_site
from conveyor.calls.call import (
    ASYNC_FUNCTION,
    FUNCTION,
    OPEN_FUNCTION,
    START,
    Call,
    with_arguments,
)
from conveyor.codec import SentDefinitions, claims
from conveyor.codec.frames import encode
from conveyor.codec.pickling.definitions import entry_of
from conveyor.exceptions import SerializationError
from conveyor.refs import staying, values
from conveyor.refs.ref import Ref
from conveyor.runtime.process import Process

_CONSTANTS = frozenset((type(None), bool, int, float, complex, str, bytes))

#: Where a call has a function or a class among its arguments. A link defines it once, and not in each frame.
_DEFINED = {FUNCTION: 0, ASYNC_FUNCTION: 0, OPEN_FUNCTION: 1, START: 0}


def is_constant(value: Any) -> bool:
    """Whether nobody can change ``value``."""
    kind = type(value)
    return kind in _CONSTANTS or (kind is tuple and all(map(is_constant, value)))


def _is_settled(argument: Any) -> bool:
    return isinstance(argument, Ref) or is_constant(argument)


class Taken(Struct, frozen=True):
    """The arguments of one call, encoded when the call was made.

    places: positions and names of the arguments that come later: refs, which stand for their values, and
        definitions.
    inner: the refs inside of the other arguments.
    """

    frame: _core.Snapshot
    places: tuple[int | str, ...]
    inner: Sequence[Any]

    def with_later(self, call: Call) -> Any:
        """Return what is sent for ``call``, whose arguments are those that have come later."""
        return _Filled(self, call[1]) if self.places else self.frame


class _Filled:
    """Arrives as the call with all its arguments."""

    __slots__ = ("taken", "values")

    def __init__(self, taken: Taken, values: tuple[Any, ...]) -> None:
        self.taken = taken
        self.values = values

    def __reduce__(self) -> Any:
        return _fill, (self.taken.frame, self.taken.places, self.values)


def _fill(call: Call, places: tuple[int | str, ...], values: tuple[Any, ...]) -> Call:
    args, kwargs = list(call[1]), dict(call[2] or {})
    for place, value in zip(places, values, strict=True):
        if isinstance(place, int):
            args[place] = value
        else:
            kwargs[place] = value
    return with_arguments(call, tuple(args), kwargs)


def take(call: Call) -> tuple[Call, Taken | None]:
    """Take the arguments of ``call`` as they are now. Returns the call with those that come later, and the
    rest; ``None``: nobody can change the rest, and the call has it as it was.

    Raises what keeps them from being encoded.
    """
    name, args, kwargs, returns, what = call
    defined = _DEFINED.get(what)
    if defined is not None and entry_of(args[defined]) is None:
        encode(args[defined], SentDefinitions())  # it is as it is now, whenever it is sent
    elif not kwargs and all(map(_is_settled, args)):
        return call, None
    given: dict[int | str, Any] = dict(enumerate(args))
    given.update(kwargs or {})
    later = {k: v for k, v in given.items() if isinstance(v, Ref) or k == defined}
    if all(k in later or is_constant(v) for k, v in given.items()):
        return call, None
    rest = tuple([None if i in later else arg for i, arg in enumerate(args)])
    named = {k: None if k in later else v for k, v in (kwargs or {}).items()}
    frame = _core.Snapshot((name, rest, named or None, returns, what), SentDefinitions())
    inner = claims.take(frame.meta) if frame.has_refs else ()
    waiting: Call = name, tuple(later.values()), None, returns, what
    return waiting, Taken(frame, tuple(later), inner)


def take_result(result: Any) -> tuple[_core.Snapshot, Sequence[Any]]:
    """Take a result that has to wait while others may change it. Returns what is sent in its place, and what
    is to be held until then."""
    frame = _core.Snapshot(result, SentDefinitions())
    return frame, claims.take(frame.meta) if frame.has_refs else ()


def lacked(call: Call) -> Ref | None:
    """Return the first ref among the arguments that is not done, or whose result some thread is just taking.
    The sender has the link's lock, for which that thread may wait."""
    args, kwargs = call[1], call[2]
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Ref) and not values.at_hand(value):
            return value
    return None


def await_soon(first: Ref | None, seconds: float) -> None:
    """Wait a little for an argument that a call lacks. It spares what a possibly long wait costs: to
    prepare, be described, and take part in finding deadlocks. That costs more than most arguments take to
    come."""
    if first is None:
        return
    gate: _core.Gate | None = first._gate
    if gate is not None and first._number >= 0:
        gate.await_ready(first._number, first._reader, seconds)


def with_values(
    call: Call, actor: tuple[int, int], process: Process, site: Site | None = None
) -> Call:
    """``call`` of ``actor``, with the values of its refs, which are done. ``site``: the line that has made
    it, if that is not the one that the thread is in. Raises ``RefFailed``."""
    args, kwargs = values.with_values(call[1], call[2], afar=process.may_be_elsewhere(actor[0]))
    for given, sent in zip(call[1], args, strict=True):
        if sent is not given:
            _warn_of_sharing(given, sent, actor, site)
    for key, given in (call[2] or {}).items():
        if kwargs[key] is not given:
            _warn_of_sharing(given, kwargs[key], actor, site)
    return with_arguments(call, args, kwargs)


#: To whom a value that has stayed where it was made was passed: the actor that has it, and another one.
_OWN, _OTHER = 1, 2


def _warn_of_sharing(ref: Ref, sent: object, actor: tuple[int, int], site: Site | None) -> None:
    """Warn, once, where a value is passed both to the actor that has it, which gets the very object, and
    to another one, which gets what is in it then."""
    place = staying.shared_at(sent)
    if place is None:
        return
    before = ref._passed
    ref._passed = passed = before | (_OWN if place == actor else _OTHER)
    if passed == _OWN | _OTHER != before:
        where = staying.located(sent)
        assert where is not None
        # It names no ref: Python keeps each text of a warning for ever.
        (site or users_site()).warn(
            f"a value is being passed back to the actor that created it, {where.keeper}, and to another one "
            f"as well. Its tensors and arrays have stayed there: what {where.keeper} writes to them is seen "
            "by whoever fetches them afterwards. Write to a copy, or wait with "
            "conveyor.experimental.wait_tensor_freed"
        )


def outcome_of(error: BaseException) -> BaseException:
    """Return the error that the ref of a call raises if its arguments could not be sent. Errors that would
    interrupt or end the process are replaced, for whoever asks for the result."""
    if isinstance(error, values.RefFailed):
        return error.error
    if isinstance(error, Exception):
        return error
    told = SerializationError(f"the arguments cannot be sent: {type(error).__name__}: {error}")
    told.__cause__ = error
    return told
