"""Refs as arguments of calls and of executions.

A ref that is itself an argument stands for its value: whoever sends waits until it is done, and sends
what the ref keeps, as it is. A ref inside of an argument, or inside of the value of one, arrives as a ref
(``refs.imports``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pickle import PickleBuffer
from typing import Any

from msgspec.structs import replace

from conveyor import _core
from conveyor.codec import SENT, SentDefinitions, add_reducers, borrows
from conveyor.codec.direct import keep_out_of_band
from conveyor.codec.encoded import REFS
from conveyor.codec.frames import decode
from conveyor.exceptions import RuntimeStateError, SessionEndedError
from conveyor.plan.model import Argument, Const, Task
from conveyor.refs.imports import BorrowDirectory, load, reduce_done
from conveyor.refs.ref import EMPTY, DeferredValue, Ref, same, usable_remotely
from conveyor.refs.streams import StreamRef
from conveyor.runtime import context, ending
from conveyor.runtime.waiting import PassingOn

#: Whether one of the arguments, positional or by name, is itself a ref.
refs_among = _core.refs_among


class RefFailed(Exception):
    """Raised for an argument that is a ref and has ``error`` in place of a value."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


def lacking(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Ref | None:
    """Return the first ref among the arguments for which nothing can be sent yet. This begins nothing:
    whoever waits for the ref does, with ``is_there`` or ``wait_for``."""
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, StreamRef):
            if not value.is_whole:
                return value
        elif isinstance(value, Ref) and not value.done():
            return value
    return None


def is_there(ref: Ref) -> bool:
    """Whether what is sent for it is there. A stream begins to take its items, all of which are sent."""
    return ref.gather() if isinstance(ref, StreamRef) else ref.done()


def at_hand(ref: Ref) -> bool:
    """Whether what is sent for it is there, and is had without waiting for a thread that is just taking it:
    that may be this very one, or one that waits for a lock which the caller has. If there is one, the
    doorbell rings when it has the result."""
    if isinstance(ref, StreamRef):
        return ref.gather()
    return ref.done() and all(_is_free(part) for part in ref.parts())


def _is_free(part: Ref) -> bool:
    # What comes by message is nobody's to take.
    if part._outcome is not EMPTY or part._window is None:
        return True
    by = object()
    try:
        return part._begin_resolve(by)
    finally:
        part._end_resolve(by)


def with_values(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    decoded: bool = False,
    on_other_node: bool = False,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with what is sent in the place of each ref among them; all of them are done.

    ``decoded``: with their values, for who takes parts of them. ``on_other_node``: with the values of those
    that cannot be fetched from another node. Raises ``RefFailed`` with the error of a ref that has one.
    """
    stand_in = value_of if decoded else _stand_in_remote if on_other_node else _stand_in
    return (
        tuple([stand_in(a) if isinstance(a, Ref) else a for a in args]),
        {k: stand_in(a) if isinstance(a, Ref) else a for k, a in (kwargs or {}).items()},
    )


def _stand_in(ref: Ref) -> Any:
    try:
        return ref.to_send()
    except Exception as error:
        raise RefFailed(_as_argument(ref, error)) from error


def _stand_in_remote(ref: Ref) -> Any:
    sent = _stand_in(ref)
    return sent if usable_remotely(sent) else value_of(ref)


def value_of(ref: Ref) -> Any:
    """Return the value of a ref that is done; ``RefFailed`` if it has none."""
    try:
        with PassingOn():
            return ref.to_send() if isinstance(ref, StreamRef) else ref.get()
    except Exception as error:
        raise RefFailed(_as_argument(ref, error)) from error


def _as_argument(ref: Ref, error: Exception) -> Exception:
    """``error`` of a ref that is an argument. Its session may have ended, and another one goes on."""
    if type(error) is not SessionEndedError or ending.begun_by_others():
        return error
    runtime = context.running()
    if runtime is None or runtime.ending:
        return error
    return RuntimeStateError(
        f"{ref!r}, which is an argument, belongs to a session that has ended before it was done"
    )


def wait_for(ref: Ref) -> None:
    """Wait until ``ref`` is done, by getting it: that takes part in finding deadlocks."""
    try:
        with PassingOn():
            if isinstance(ref, StreamRef):
                ref.await_whole()
            else:
                ref.get()
    except Exception:  # its outcome, for who needs it; or a wait that would never end
        if not ref.done():
            raise


def wait_for_all(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> None:
    """Wait until no ref among the arguments is lacking."""
    while (ref := lacking(args, kwargs)) is not None:
        wait_for(ref)


def with_bound_values(tasks: Mapping[int, Task]) -> dict[int, Task]:
    """Tasks in which refs that were bound as arguments stand for their values; waits for them. Raises
    the error of one that has failed."""
    return {number: _bound(task) for number, task in tasks.items()}


def _bound(task: Task) -> Task:
    refs = [a for a in (*task.args, *(a for _, a in task.kwargs)) if _is_bound_ref(a)]
    if not refs:
        return task
    return replace(
        task,
        args=tuple(_bound_value(a) for a in task.args),
        kwargs=tuple((name, _bound_value(a)) for name, a in task.kwargs),
    )


def _is_bound_ref(argument: Argument) -> bool:
    return isinstance(argument, Const) and isinstance(argument.value, Ref)


def _bound_value(argument: Argument) -> Argument:
    if not isinstance(argument, Const) or not isinstance(argument.value, Ref):
        return argument
    wait_for(argument.value)
    error = None
    try:
        sent = _stand_in(argument.value)
        if type(sent) is DeferredValue or (type(sent) is _core.Snapshot and sent.keeps):
            sent = value_of(argument.value)  # a plan keeps nothing for anybody
        return Const(sent)
    except RefFailed as failed:
        error = failed.error
    try:
        raise error  # not from what refers to it
    finally:
        del error


# How they are pickled on their way into a frame.


def _make_reducers(notes: dict[Any, Any]) -> dict[type, Callable[[Any], Any]]:
    def reduce(ref: Ref) -> Any:
        sent = notes.get(SENT)
        if sent is None:  # no frame, and so nobody to hold borrows
            notes.setdefault(REFS, []).append(ref)
            return ref.__reduce_ex__(5)
        done = reduce_done(ref)
        if done is not None:
            return done
        made = notes.setdefault(borrows.BORROWS, {})
        found = made.get(id(ref))
        if found is None:
            found = made[id(ref)] = (ref, ref.new_borrow(sent.readers))
        return load, found[1]

    def reduce_deferred(deferred: DeferredValue) -> Any:
        if deferred.snapshot.keeps and _by_reference(notes.get(SENT), deferred.snapshot):
            keep_out_of_band(notes, deferred.ref)
        return same, (deferred.snapshot,)

    def reduce_snapshot(snapshot: _core.Snapshot) -> Any:
        sent = notes.get(SENT)
        parts = snapshot.loose()
        if parts is None or (snapshot.keeps and not _by_reference(sent, snapshot)):
            return same, (snapshot.decode(),)
        if snapshot.keeps:
            keep_out_of_band(notes, snapshot)
        codec, meta, buffers = parts
        return decode, (codec, meta, [PickleBuffer(b) for b in buffers or ()])

    return {
        **dict.fromkeys(_kinds(Ref), reduce),
        _core.Snapshot: reduce_snapshot,
        DeferredValue: reduce_deferred,
    }


def _by_reference(sent: SentDefinitions | None, snapshot: _core.Snapshot) -> bool:
    """Whether what is kept somewhere for ``snapshot`` may be referred to."""
    if sent is None or sent.in_band:
        return False
    return not sent.is_remote() or usable_remotely(snapshot)


def _kinds(kind: type) -> list[type]:
    kinds = [kind]
    below: list[type] = type.__subclasses__(kind)
    for derived in below:
        kinds += _kinds(derived)
    return kinds


add_reducers(_make_reducers)
borrows.install(BorrowDirectory())
