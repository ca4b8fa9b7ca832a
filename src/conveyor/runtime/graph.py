"""A compiled graph over processes, as whoever executes it holds it: submit, wait, tear down."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from conveyor import _core
from conveyor.config import Config
from conveyor.exceptions import CapacityError, ConveyorError, GraphTornDownError, WaitTimeoutError
from conveyor.plan.model import Plan
from conveyor.runtime.arguments import match_inputs
from conveyor.runtime.compiled import CompiledGraph
from conveyor.runtime.hosting import GraphHost, Member
from conveyor.runtime.links import describe_status
from conveyor.runtime.refs import EMPTY, Ref, final
from conveyor.runtime.results import GraphRef, Results
from conveyor.runtime.streams import GraphStream, Items
from conveyor.runtime.waiting import Patience, wait_until


def _references_of_a_moved_value() -> int:
    # How many references an argument of execute() has when its maker keeps none: measured, because
    # it differs between versions of Python. Same shape as ProcessGraph.execute.
    lock = threading.Lock()

    def execute(*args: Any, timeout: float | None = None, **kwargs: Any) -> int:
        with lock:
            return _core.refcount(args[0])

    return execute(object())


_MOVED_REFS = _references_of_a_moved_value()


def _refuse(_value: Any, graph: ProcessGraph, _type: type[GraphRef]) -> NoReturn:
    # Not a method: the graph would refer to itself, and its channels would stay until a collection.
    raise graph._why().with_traceback(None)


class ProcessGraph(CompiledGraph):
    """On actors that are processes."""

    def __init__(self, host: GraphHost, plan: Plan, config: Config) -> None:
        laid = host.lay(plan, config)
        super().__init__(plan, config, laid.number)
        self._host = host
        self._process = process = host.process
        self._members = laid.members
        self._lock = threading.Lock()
        self._unloading: list[tuple[Member, Ref]] = []
        try:
            writers = {end.edge: end.open(process, laid.segment) for end in laid.writes}
            readers = {end.edge: end.open(process, laid.segment) for end in laid.reads}
        except ConveyorError:
            host.unlay(laid.number)
            for member in laid.members:
                if not member.alive:  # just now
                    raise member.death() from None
            raise
        for writer in writers.values():
            writer.moved_refs = _MOVED_REFS
        laid.segment.close_fd()
        self._results = Results(plan, host.put)
        for ended, items in plan.streams:
            taken = Items(readers[items], process)
            self._results.streams[ended] = functools.partial(GraphStream, taken)
        self.gate = _core.Gate(
            [writers[bundle.edge] for bundle in plan.inputs],
            [readers[edge] for edge in self._results.edges],
            plan.depth,
            _core.KIND_VALUE,
            process.inbox,
        )
        # The one thing the hot path looks at: replaced by a function that raises at the end.
        self._start: Callable[[Any, ProcessGraph, type[GraphRef]], GraphRef | None]
        self._start = self.gate.start
        self._plain = plan.whole_input and plan.shape is None
        self._single_output = self._results.single
        self._finalizer = weakref.finalize(self, host.drop, laid.number)
        self._finalizer.atexit = False
        host.graphs.add(self)

    # Executing

    def execute(self, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        if self._plain and len(args) == 1 and not kwargs:
            with self._lock:
                ref = self._start(args[0], self, GraphRef)
            if ref is not None:
                return ref if self._single_output else self._refs(ref, {})
        return self._execute(args, kwargs, timeout)

    def try_execute(self, *args: Any, **kwargs: Any) -> Any:
        inputs = match_inputs(self.plan, self.name, args, kwargs)
        passed = self._results.passed(args, kwargs)
        ref = self._submit_once(inputs)
        if ref is None:
            raise CapacityError(f"{self.name}: {self.plan.depth} executions are on their way")
        return self._refs(ref, passed)

    async def execute_async(self, *args: Any, **kwargs: Any) -> Any:
        inputs = match_inputs(self.plan, self.name, args, kwargs)
        passed = self._results.passed(args, kwargs)
        while True:
            ref = self._submit_once(inputs)
            if ref is not None:
                return self._refs(ref, passed)
            from conveyor.runtime.aio import wait_until  # asyncio is slow to import

            await wait_until(self._may_submit)

    def _execute(self, args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float | None) -> Any:
        if "timeout" in self.plan.keywords:
            kwargs["timeout"] = timeout
            timeout = None
        if timeout is not None and timeout < 0:
            timeout = None
        inputs = match_inputs(self.plan, self.name, args, kwargs)
        passed = self._results.passed(args, kwargs)
        patience = Patience(timeout)
        if not self._lock.acquire(timeout=-1 if timeout is None else timeout):
            raise WaitTimeoutError(
                f"timed out after {timeout:g} s waiting for another thread's submission to {self.name}"
            )
        try:
            # Held while waiting for room: who comes first goes first.
            while True:
                ref = self._submit_inputs(inputs)
                if ref is not None:
                    return self._refs(ref, passed)
                wait_until(
                    self._process.inbox,
                    self._may_submit,
                    patience.step() if timeout is not None else None,
                    lambda: f"room for another execution of {self.name} (depth {self.plan.depth})",
                    self.doing,
                )
        finally:
            self._lock.release()

    def _submit_once(self, inputs: tuple[Any, ...]) -> GraphRef | None:
        if not self._lock.acquire(False):
            return None
        try:
            return self._submit_inputs(inputs)
        finally:
            self._lock.release()

    def _submit_inputs(self, inputs: tuple[Any, ...]) -> GraphRef | None:
        if self._closed_or_failed():
            raise self._why().with_traceback(None)
        if len(inputs) == 1:
            return self._start(inputs[0], self, GraphRef)
        number = self.gate.submit_many(inputs)
        return GraphRef(self, number) if number >= 0 else None

    def _may_submit(self) -> bool:
        return self._closed_or_failed() or self.gate.has_room

    def _refs(self, first: GraphRef, passed: Mapping[int, Ref]) -> Any:
        """What ``execute`` returns, given the ref of the first thing that the driver reads."""
        if self._single_output:
            return first
        number = first._number
        others = (GraphRef(self, number, i) for i in range(1, len(self._results.edges)))
        return self._results.arrange([first, *others], passed)

    # Waiting

    def wait_for(self, ref: Ref, timeout: float | None) -> Any:
        gate = self.gate
        value = gate.get(ref._number, ref._reader, 0.0 if timeout == 0 else _FIRST_LOOK)
        if value is not EMPTY:
            return value
        patience = Patience(timeout)
        while True:
            deaths = self._process.board.deaths
            if self._closed_or_failed():
                value = gate.take(ref._number, ref._reader)  # what had come before
                if value is not EMPTY:
                    return value
                raise final(self._why())
            value = gate.get(ref._number, ref._reader, patience.step(), deaths)
            if value is not EMPTY:
                return value
            patience.check(lambda: self.describe(ref), self.doing)

    def is_ready(self, ref: Ref) -> bool:
        return self.gate.ready(ref._number, ref._reader) or self._closed_or_failed()

    def _closed_or_failed(self) -> bool:
        if self._closed is not None or self._failure is not None:
            return True
        for member in self._members:
            if not member.alive:
                self._failure = member.death(self._label)
                self._start = _refuse
                return True
        return False

    def _why(self) -> ConveyorError:
        error = self._closed or self._failure
        assert error is not None
        return error

    def _label(self, graph: int, node: int) -> str | None:
        return self.plan.tasks[node].label if graph == self._number else None

    def doing(self) -> str:
        """What each actor of the graph is doing now, in words."""
        return "; ".join(
            f"{info.name} is {describe_status(self._process.board, member.slot, self._label)}"
            for info, member in zip(self.plan.actors, self._members, strict=True)
        )

    # Ending

    def teardown(self, kill_actors: bool = False) -> None:
        if self.close(GraphTornDownError(f"{self.name} has been torn down")):
            self.gate.drain()
            self._finalizer.detach()
            self._host.graphs.discard(self)
            if kill_actors:
                for member in self._members:
                    self._host.kill(member.id)
            self._unloading = self._host.unlay(self._number)
        # One that was interrupted while it waited is finished by the next.
        while self._unloading:
            member, ack = self._unloading[-1]
            try:
                ack.get()
            except ConveyorError:
                if member.alive:
                    raise
            self._unloading.pop()

    def close(self, error: ConveyorError) -> bool:
        """No more executions, and whoever waits gets ``error``. False if it was closed before."""
        with self._lock:
            if self._closed is not None:
                return False
            self._closed = error
            self._start = _refuse
        # Other threads may wait for a result that will not come.
        self.gate.closed = True
        self._process.board.ring(self._process.slot, _core.ATTENTION_BIT)
        return True

    def orphan(self, error: ConveyorError) -> None:
        """In a forked child: the graph is the parent's. Takes no lock."""
        self._closed = error
        self._start = _refuse


#: How long a wait may last before it is worth preparing to log and describe it.
_FIRST_LOOK = 0.005
