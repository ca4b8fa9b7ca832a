"""A compiled graph over processes, as its driver holds it: submit, wait, tear down."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from conveyor import _core
from conveyor.config import Config
from conveyor.exceptions import CapacityError, ConveyorError, GraphTornDownError, WaitTimeoutError
from conveyor.plan.model import DRIVER, Plan
from conveyor.runtime.arguments import match_inputs
from conveyor.runtime.compiled import CompiledGraph
from conveyor.runtime.layout import RESULT_BIT, Assignment, Layout, Place, lay_out
from conveyor.runtime.links import describe_status
from conveyor.runtime.refs import EMPTY, Ref, final
from conveyor.runtime.results import GraphRef, Results
from conveyor.runtime.waiting import Patience, wait_until

if TYPE_CHECKING:
    from conveyor.runtime.driver import Driver
    from conveyor.runtime.supervisor import ActorRecord


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

    def __init__(self, driver: Driver, plan: Plan, config: Config) -> None:
        super().__init__(plan, config, driver.next_graph_number())
        self._driver = driver
        self._process = driver.process
        self._records: list[ActorRecord] = [driver.record(a.key) for a in plan.actors]
        self._lock = threading.Lock()
        self._unloading: list[tuple[ActorRecord, Ref]] = []
        for record in self._records:
            record.check_alive()
            record.handles += 1  # a graph keeps its actors
        places = {DRIVER: Place(self._process.slot, RESULT_BIT)}
        for actor, record in enumerate(self._records):
            places[actor] = Place(record.slot, record.bits.take())
        self._places = places
        layout = lay_out(plan, places, config.slot_bytes)
        try:
            self._load(layout)
        except BaseException:
            self._unload()
            for record in self._records:
                driver.released(record.id)
            raise
        writers = {w.edge: w.open(self._process, layout.segment) for w in layout.writes[DRIVER]}
        for writer in writers.values():
            writer.moved_refs = _MOVED_REFS
        readers = {r.edge: r.open(self._process, layout.segment) for r in layout.reads[DRIVER]}
        layout.segment.close_fd()
        self._results = Results(plan, self, driver.put)
        self.gate = _core.Gate(
            [writers[bundle.edge] for bundle in plan.inputs],
            [readers[edge] for edge in self._results.edges],
            plan.depth,
            _core.KIND_VALUE,
            self._process.inbox,
        )
        # The one thing the hot path looks at: replaced by a function that raises at the end.
        self._start: Callable[[Any, ProcessGraph, type[GraphRef]], GraphRef | None]
        self._start = self.gate.start
        self._plain = plan.whole_input and plan.shape is None
        self._single_output = self._results.single
        self._finalizer = weakref.finalize(
            self, driver.drop_graph, self._number, self._records, places
        )
        self._finalizer.atexit = False
        driver.graphs.add(self)

    # Laying

    def _load(self, layout: Layout) -> None:
        tasks = {task.id: task for task in self.plan.tasks}
        acks = []
        for program in self.plan.programs:
            record = self._records[program.actor]
            own = {step.task: tasks[step.task] for step in program.steps if hasattr(step, "task")}
            assignment = Assignment(
                self._number,
                self.name,
                self.plan.actors[program.actor].name,
                self._places[program.actor].bit,
                program,
                own,
                layout.reads.get(program.actor, ()),
                layout.writes.get(program.actor, ()),
                layout.peers_of(program.actor, self._places),
                {edge.id: edge.source for edge in self.plan.edges},
            )
            acks.append(self._driver.load(record, assignment, layout.segment.fd))
        for ack in acks:
            ack.get()

    def _unload(self) -> None:
        for actor, record in enumerate(self._records):
            if record.alive:
                record.control("unload", self._number)
            record.bits.give_back(self._places[actor].bit)

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
        for record in self._records:
            if not record.alive:
                self._failure = record.death(self._label)
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
            f"{info.name} is {describe_status(self._process.board, record.slot, self._label)}"
            for info, record in zip(self.plan.actors, self._records, strict=True)
        )

    # Ending

    def teardown(self, kill_actors: bool = False) -> None:
        if self.close(GraphTornDownError(f"{self.name} has been torn down")):
            self.gate.drain()
            self._finalizer.detach()
            self._driver.graphs.discard(self)
            for actor, record in enumerate(self._records):
                if kill_actors:
                    self._driver.kill(record.id)
                elif record.alive:
                    self._unloading.append((record, record.control("unload", self._number)))
                record.bits.give_back(self._places[actor].bit)
            for record in self._records:
                self._driver.released(record.id)
        # One that was interrupted while it waited is finished by the next.
        while self._unloading:
            record, ack = self._unloading[-1]
            try:
                ack.get()
            except ConveyorError:
                if record.alive:
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
