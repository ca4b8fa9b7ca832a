"""Base of the driver's and the actors' runtimes: calls, results, and calls that wait to be sent."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from conveyor import _core
from conveyor.calls.call import METHOD, OPEN
from conveyor.calls.functions import Functions
from conveyor.calls.links import Link
from conveyor.calls.pending import Pump
from conveyor.calls.streams import CallStream, CurrentLink
from conveyor.checks import check_timeout
from conveyor.codec import SentDefinitions
from conveyor.codec.direct import Direct
from conveyor.graph.results import Origins, get_all
from conveyor.refs.ref import Ref, blockers_of
from conveyor.refs.watcher import Watcher
from conveyor.runtime import context
from conveyor.runtime.cleanup import Cleanup
from conveyor.runtime.deadlock import WaitRegistry
from conveyor.runtime.process import Process
from conveyor.runtime.protocol import ActorId, ResultSpec
from conveyor.runtime.wait_graph import Blockers, any_of
from conveyor.runtime.waiting import TimeLimit, outstanding, wait_within
from conveyor.weak import WeakValues

if TYPE_CHECKING:
    from conveyor.calls.retrying import Retrying


class PutRef(Ref):
    """A value that was put. Each ``get`` decodes it."""

    __slots__ = ()

    def __init__(self, value: Any) -> None:
        super().__init__(_NOWHERE, -1)
        self._outcome = _core.Snapshot(value, SentDefinitions())
        self._hold(self._outcome)

    def __repr__(self) -> str:
        return "<PutRef>"


#: The source of refs that were never on their way, which is asked nothing.
_NOWHERE: Any = SimpleNamespace(window=None)


class CallingRuntime:
    """Calls and results, the same in the driver and in an actor."""

    #: The actor whose process this is; ``None`` in the driver.
    own_actor: ActorId | None = None
    places = False

    def __init__(self, process: Process, cleanup: Cleanup) -> None:
        self.process = process
        self._process_table = process.process_table
        #: What is left to be done for what is garbage here.
        self.cleanup = cleanup
        self.pid = os.getpid()
        self.pump = Pump(process.inbox)
        self.watcher = Watcher(process.inbox, process.notify)
        self.retrying: WeakValues[int, Retrying] = WeakValues()
        #: By the number of the actor.
        self.links: dict[int, Link] = {}
        self._origins: Origins | None = None
        #: Functions called here, by the options of their workers.
        self._functions: dict[Hashable, Functions] = {}
        self._stream_numbers = itertools.count()

    @property
    def ending(self) -> bool:
        return self.process.ended

    @property
    def inbox(self) -> _core.Inbox:
        return self.process.inbox

    @property
    def wait_registry(self) -> WaitRegistry:
        return self.process.wait_registry

    def link(self, actor: ActorId) -> CurrentLink:
        """A link to the process that ``actor`` has now; raises its death if there is none."""
        raise NotImplementedError

    def call(
        self,
        actor: ActorId,
        method: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        result_spec: ResultSpec,
        what: int = METHOD,
        again: bool = False,
    ) -> Any:
        call = method, args, dict(kwargs) if kwargs else None, result_spec, what
        return self._known_link(actor).call(call, again)

    def end_links(self) -> None:
        """Fail all waiting calls at the end of the session. Whoever waits for a call has the error, and no
        call waits to be sent."""
        links = list(self.links.values())
        for link in links:
            link.window.closed = True
        # Before anything that needs a link's lock: who has one may wait for somebody.
        self.process.notify()
        for link in links:
            link.fail_pending()
        for functions in list(self._functions.values()):
            functions.fail_if_lost()

    def find_transport(self, name: str) -> bytes | None:
        return context.TRANSPORTS.get(name)

    def add_transport(self, name: str, registration: bytes) -> None:
        context.add_transport(name, registration)

    def _known_link(self, actor: ActorId) -> CurrentLink:
        """Return the link to an actor, the same one for as long as it can be used; see :meth:`link`."""
        link = self.links.get(actor.index)
        return self.link(actor) if link is None or link.gone else link

    def functions(self, kind: Hashable, start: Callable[[], Any]) -> Any:
        found = self._functions.get(kind)
        if found is None:
            made = Functions(self.process, self.pump, start, lambda one: self._known_link(one._id))
            found = self._functions.setdefault(kind, made)
        return found

    def stream(
        self,
        actor: ActorId,
        method: str,
        is_async: bool,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        what: int = OPEN,
        result_spec: ResultSpec = 1,
    ) -> CallStream:
        self.cleanup.do()
        call = method, args, dict(kwargs) if kwargs else None, result_spec, what
        key = self.process.slot, next(self._stream_numbers)
        return CallStream(key, self.cleanup, self._known_link(actor), actor.name, call, is_async)

    def allocate(self, size: int) -> _core.Buffer:
        return self.process.shortage.allocate(size)

    def get(self, refs: Any, timeout: float | None) -> Any:
        return get_all(refs, timeout)

    def put(self, value: Any, transport: str | None = None, snapshot: bool = False) -> Ref:
        if isinstance(value, Ref):
            raise TypeError("put takes a value, not a ref")
        return PutRef(value if transport is None else Direct(value, transport, snapshot))

    def origins(self) -> Origins:
        """Record of the lines where results were got; of graphs in debug mode."""
        if self._origins is None:
            self._origins = Origins()
        return self._origins

    def keep(self, value: Any) -> Ref:
        """Store a value like ``put``, but of any kind: a ref to a ref as well."""
        return PutRef(value)

    def wait(
        self, refs: Sequence[Any], num_returns: int, timeout: float | None
    ) -> tuple[list[Any], list[Any]]:
        refs = list(refs)
        timeout = check_timeout(timeout)
        if not 0 < num_returns <= len(refs):
            raise ValueError(f"num_returns must be from 1 to {len(refs)}, not {num_returns}")
        found = _core.take_done(refs, num_returns, num_returns, Link, Ref.done)
        if found is not None:
            return found, refs
        time_limit = TimeLimit(timeout)

        def ready() -> bool:
            nonlocal found
            if found is None:
                found = _core.take_done(refs, num_returns, num_returns, Link, Ref.done)
            return found is not None or time_limit.over()

        def ask(question: int) -> Blockers | None:
            missing = [ref for ref in refs if not ref.done()]
            # As many as must not all fail to come.
            enough = missing[: len(missing) - (num_returns - len(refs) + len(missing)) + 1]
            return any_of([blockers_of(ref, question) for ref in enough])

        with self.process.wait_registry.waiting(ask, True, time_limit.bounded) as wait:
            wait_within(
                self.process.inbox,
                ready,
                time_limit,
                lambda: f"{num_returns} of {len(refs)} results",
                lambda: outstanding(refs),
                wait,
            )
        if found is None:
            found = _core.take_done(refs, 0, num_returns, Link, Ref.done)
            assert found is not None
        return found, refs
