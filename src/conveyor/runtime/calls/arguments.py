"""Refs among the arguments of a call, and what becomes of it if one of them has no value."""

from __future__ import annotations

from conveyor import _core
from conveyor.callers import Site, users_site
from conveyor.exceptions import SerializationError
from conveyor.runtime.calls.call import Call, with_arguments
from conveyor.runtime.refs import staying, values
from conveyor.runtime.refs.ref import Ref


def lacked(call: Call) -> Ref | None:
    """The first of the refs among its arguments that is not done, or whose result some thread is just taking:
    whoever sends has the link's lock, for which that thread may wait."""
    args, kwargs = call[1], call[2]
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Ref) and not values.at_hand(value):
            return value
    return None


def await_soon(first: Ref | None, seconds: float) -> None:
    """Wait a little for what a call lacks. To prepare for a wait that may be long, be described and take
    part in finding deadlocks costs more than most arguments take to come."""
    if first is None:
        return
    gate: _core.Gate | None = first._gate
    if gate is not None and first._number >= 0:
        gate.await_ready(first._number, first._reader, seconds)


def with_values(
    call: Call, actor: tuple[int, int], board: _core.Board, site: Site | None = None
) -> Call:
    """``call`` of ``actor``, with the values of its refs, which are done. ``site``: the line that has made
    it, if that is not the one that the thread is in. Raises ``RefFailed``."""
    args, kwargs = values.with_values(call[1], call[2], afar=board.elsewhere(actor[0]))
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
    """What the ref of a call raises whose arguments could not be sent. Nobody who asks for it is to be
    interrupted or to leave."""
    if isinstance(error, values.RefFailed):
        return error.error
    if isinstance(error, Exception):
        return error
    told = SerializationError(f"the arguments cannot be sent: {type(error).__name__}: {error}")
    told.__cause__ = error
    return told
