"""The caller's side of a generator method that is called, and not a task of a graph.

Such a call is several on the wire: one that opens the generator, with a key and the arguments, then one for
each item, one ahead of who takes them, and one that closes it. The items stay with the actor until they are
asked for (``calls.generators``).
"""

from __future__ import annotations

import functools
import threading
from typing import Any, Protocol

from conveyor import _core
from conveyor.calls.call import ASYNC_NEXT, CLOSE, NEXT, Call
from conveyor.calls.generators import Key
from conveyor.codec import copy_to_raise
from conveyor.refs.ref import EMPTY, Ref, blockers_of, cancelled_error, may_need_fetch
from conveyor.refs.streams import NoGenerator, StreamRef
from conveyor.runtime.cleanup import Cleanup
from conveyor.runtime.wait_graph import Blockers


class CurrentLink(Protocol):
    """Link to an actor as it is now, and to nothing that comes after its death."""

    @property
    def gone(self) -> bool:
        """Whether every call raises why."""

    def call(self, call: Call, again: bool = False) -> Any:
        """Start a call; one ref, or a list of them if it has several results. ``again``: ahead of those that
        have not been sent."""


def _close(link: CurrentLink, method: str, key: Key, cancelled: bool = False) -> None:
    """Close a generator: nobody takes its items any more. ``cancelled``: nobody wants its errors, either."""
    if link.gone:
        return
    closed: Ref = link.call((method, (key,), None, 1, CLOSE))
    if cancelled and closed._outcome is EMPTY and closed._number >= 0:
        closed._fail(cancelled_error(method))
        closed._window.drop_cancelled(closed._number, closed._reader)


class CallStream(StreamRef):
    """The items of one call."""

    __slots__ = (
        "_actor_name",
        "_ahead",
        "_cancelled",
        "_cleanup",
        "_error",
        "_finalizer",
        "_key",
        "_link",
        "_method",
        "_opened",
        "_over",
        "_result_spec",
        "_taking",
        "_what",
    )

    def __init__(
        self,
        key: Key,
        cleanup: Cleanup,
        link: CurrentLink,
        actor_name: str,
        call: Call,
        is_async: bool,
    ) -> None:
        """``call`` opens a generator, by ``key``, which is put before its arguments. ``cleanup``: takes
        the work that is left when the stream is garbage."""
        self._over = False
        self._cancelled = False
        # Of asking for the item after the last that was given.
        self._error: BaseException | None = None
        self._key = key
        self._cleanup = cleanup
        # The generator is in the process at its other end: one that comes after that has none.
        self._link = link
        self._actor_name = actor_name
        self._method = method = call[0]
        self._what = ASYNC_NEXT if is_async else NEXT
        # The generator may go on although its items can come no more: whatever happens here from now on, it
        # is closed once this is garbage.
        close = functools.partial(_close, link, method, key)
        finalizer = cleanup.finalizer(close)
        self._finalizer: _core.Finalizer | None = finalizer
        self._result_spec = call[3]  # of each item
        name, args, kwargs, _, what = call
        try:
            opened: Ref = link.call((name, (key, *args), kwargs, 1, what))
        except Exception:  # it was not opened
            finalizer.revoke()
            raise
        super().__init__(opened._source)
        self._opened: Ref | None = opened
        # Held by who takes an item: the next one is asked for once. Reentrant, for signal handlers.
        self._taking = threading.RLock()
        self._ahead: Ref = self._ask(again=False)

    def _ask(self, again: bool) -> Ref:
        """Ask for an item. ``again``: the generator has been opened. Calls that wait in this process wait for
        its items, perhaps, and for their arguments: it overtakes them."""
        call = (self._method, (self._key,), None, self._result_spec, self._what)
        ref: Ref = self._link.call(call, again)
        return ref

    def _look(self) -> Any:
        with self._taking:
            return self._take()

    def _take(self) -> Any:
        if self._over:
            raise StopIteration
        if self._cancelled:
            raise cancelled_error(f"{self._actor_name}.{self._method}")
        if self._error is not None:
            raise copy_to_raise(self._error)
        if not self._ahead.done():
            return EMPTY
        # What they raise stays theirs: kept here, its frames would keep all that its catchers had.
        if self._opened is not None:
            self._opened.get()
            self._opened = None
        found = self._ahead.get()
        if found is None:
            self._over = True
            if self._finalizer is not None:
                self._finalizer.revoke()
            raise StopIteration
        if len(found) > 1:
            raise NoGenerator(f"{self._actor_name}.{self._method}", found[0])
        try:
            self._ahead = self._ask(again=True)
        except Exception as error:  # comes after this item
            self._error = error.with_traceback(None)
        return found[0]

    def _is_there(self) -> bool:
        ended = self._over or self._cancelled or self._error is not None
        return ended or self._ahead.done()

    def _may_need_fetch(self) -> bool:
        ended = self._over or self._cancelled or self._error is not None
        return not ended and may_need_fetch(self._ahead)

    def cancel(self) -> bool:
        ahead = self._ahead
        if self._over or self._cancelled or self._error is not None:
            return False
        if not ahead.cancel() and not _is_item(ahead):
            return False
        if self._opened is not None:  # the actor may be busy: nobody has to wait until it begins
            self._opened.cancel()
        self._cancelled = True
        finalizer, self._finalizer = self._finalizer, None
        if finalizer is not None:
            finalizer.revoke()
            self._cleanup.soon(
                functools.partial(_close, self._link, self._method, self._key, cancelled=True)
            )
        self._cleanup.do()
        return True

    def cancelled(self) -> bool:
        return self._cancelled

    def parts(self) -> tuple[Ref, ...]:
        return (self._ahead,) if self._opened is None else (self._opened, self._ahead)

    def _blockers(self, question: int) -> Blockers | None:
        return blockers_of(self, question)

    def _describe(self) -> str:
        return f"the next item of {self._actor_name}.{self._method}"

    def _doing(self) -> str:
        doing: str = self._source.doing()
        return doing


def _is_item(ahead: Ref) -> bool:
    """Whether what has come is an item: neither the generator's end nor its error."""
    try:
        return ahead._unfetched() is not None
    except Exception:
        return ahead._outcome is EMPTY  # it is there, and could not be had just now
