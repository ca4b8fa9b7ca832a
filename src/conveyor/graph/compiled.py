"""The result of ``dag.compile()``, whichever process compiled the graph and whatever engine its actors have.

Each part is handed those it needs, and knows no part that uses it: ``CompiledGraph -> Submitter -> Entry ->
source of the refs -> GraphInfo -> Lifecycle -> Epoch``.

Drawing and statistics are in ``conveyor.observe``, which is imported for them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Mapping
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from msgspec import Struct

import conveyor
from conveyor.config import Config
from conveyor.graph.lifecycle import GraphInfo
from conveyor.graph.status import GraphStatus
from conveyor.graph.submission import Submitter
from conveyor.plan import explain
from conveyor.plan.explain import counted
from conveyor.plan.model import Plan
from conveyor.typevars import ResultT
from conveyor.user_frames import trimmed


def graph_id(number: int) -> str:
    """Return a text that names graph ``number`` among all of its session."""
    return f"{number:08x}"


class GraphControl(Protocol):
    """Everything that a ``CompiledGraph`` does but execute, in its owner's process or in another. See the
    methods of the same names of ``CompiledGraph``."""

    @property
    def plan(self) -> Plan: ...

    @property
    def config(self) -> Config: ...

    @property
    def is_teardown(self) -> bool: ...

    def restart(self) -> None: ...

    def teardown(self, kill_actors: bool = False) -> None: ...

    def check_block(self) -> None:
        """Raise why the graph cannot be torn down at the end of a ``with`` block, before one begins."""
        ...

    def describe(self) -> str:
        """Return the graph's kind, size and state, for ``repr``. Asks no other process."""
        ...

    def explain(self) -> str: ...

    def draw(self, *args: Any) -> str:
        """Draw the graph, with the arguments of ``visualize``."""
        ...

    def status(self, stacks: bool = False) -> GraphStatus: ...

    def stats(self) -> conveyor.observe.GraphStats: ...

    def trace(self, path: str | os.PathLike[str], max_events: int) -> conveyor.observe.Trace: ...

    def simulate(self, durations: Any, options: dict[str, Any]) -> conveyor.observe.Simulation: ...

    def html(self, title: str) -> str:
        """Return the HTML that a notebook shows under ``title``."""
        ...


class OwnerControl:
    """Control of a graph that this process executes."""

    def __init__(self, graph_info: GraphInfo, how: str = "") -> None:
        """``how``: how the actors run, if they are no processes."""
        self._graph_info = graph_info
        self._how = f", {how}" if how else ""

    @property
    def plan(self) -> Plan:
        return self._graph_info.plan

    @property
    def config(self) -> Config:
        return self._graph_info.config

    @property
    def is_teardown(self) -> bool:
        return self._graph_info.is_teardown

    def restart(self) -> None:
        self._graph_info.restart()

    def teardown(self, kill_actors: bool = False) -> None:
        self._graph_info.lifecycle.teardown(kill_actors)

    def check_block(self) -> None:
        self._graph_info.lifecycle.check_block()

    def describe(self) -> str:
        plan = self.plan
        size = f"{counted(len(plan.tasks), 'task')} on {counted(len(plan.actors), 'actor')}"
        return f"{size}{self._how}, {self._graph_info.state}"

    def explain(self) -> str:
        return explain(self.plan, self._graph_info.name, self._graph_info.hosts)

    def draw(self, *args: Any) -> str:
        visualize: Callable[..., str] = conveyor.observe.visualize
        return visualize(self.plan, *args, self._graph_info.name)

    def status(self, stacks: bool = False) -> GraphStatus:
        return self._graph_info.status(stacks)

    def stats(self) -> conveyor.observe.GraphStats:
        return conveyor.observe.read_stats(self._graph_info)

    def trace(self, path: str | os.PathLike[str], max_events: int) -> conveyor.observe.Trace:
        return conveyor.observe.Trace(self._graph_info, path, max_events)

    def simulate(self, durations: Any, options: dict[str, Any]) -> conveyor.observe.Simulation:
        return conveyor.observe.simulate_graph(self._graph_info, durations, **options)

    def html(self, title: str) -> str:
        return conveyor.observe.graph_html(self._graph_info, title)


G = TypeVar("G", bound="CompiledGraph[Any]")


class GraphParts(Struct, frozen=True):
    """The parts behind a ``CompiledGraph``."""

    number: int
    name: str
    submitter: Submitter[Any]
    control: GraphControl
    #: Returns the result of the graph's ``__reduce__``.
    reduce: Callable[[CompiledGraph[Any]], tuple[Any, ...]]


def parts_of(graph: CompiledGraph[Any]) -> GraphParts:
    """Return the parts of ``graph``, for the library itself."""
    return graph._parts


class CompiledGraph(Generic[ResultT]):
    """A graph whose processes, channels and schedule are deployed; made by ``dag.compile()``.

    Any number of threads may execute it and get its results. Use it as a context manager, or call
    :meth:`teardown`; the actors can be used for anything else before and after.

    A graph can be an argument of an actor's method. What arrives there executes the same graph: its
    executions have one order with those of everybody else, and their refs are like any other. It can be
    explained and says its status and what it has counted, all of which its owner, the process that
    compiled it, is asked for. But its owner alone can tear it down, restart, draw, trace or simulate
    it, and has its ``plan`` and ``config``: elsewhere these raise ``RuntimeStateError``.
    """

    def __init__(self, parts: GraphParts) -> None:
        self._parts = parts
        self._submitter = parts.submitter
        # The fast path, which almost every execution takes.
        self._fast_path = parts.submitter.fast_path

    @property
    def name(self) -> str:
        """The graph's name in messages: the setting of this name, or one with its number."""
        return self._parts.name

    @property
    def plan(self) -> Plan:
        """The Plan: what every actor of the graph does, in which order, over which channel."""
        return self._parts.control.plan

    @property
    def config(self) -> Config:
        """The settings that the graph was compiled with."""
        return self._parts.control.config

    def get_id(self) -> str:
        """A text that names the graph among all of its session."""
        return graph_id(self._parts.number)

    def execute(
        self,
        /,
        *args: Any,
        timeout: float | None = None,
        deadline: float | None = None,
        **kwargs: Any,
    ) -> ResultT:
        """Start one execution and return its ref (a list of refs for ``MultiOutputNode``).

        Refs that are arguments are replaced by their values (those inside of arguments arrive as refs);
        it waits for those that are not done. An error in one of them is that execution's error, and
        nothing is sent.
        Every argument is encoded before anything is sent: one that cannot be sent raises
        ``SerializationError`` and leaves no trace. Waits while ``depth`` executions are on their way;
        ``timeout`` (seconds, ``None`` or -1: no limit) bounds that wait with ``WaitTimeoutError``.
        ``deadline``: seconds from now in which all of it must have run (default: the one in
        ``Config``); after that, tasks that have not begun are skipped, coroutines are cancelled, and
        whoever gets a result that is not there gets ``DeadlineExceededError``. An input of the graph
        that is called ``timeout`` or ``deadline`` wins over the option.
        Raises ``ActorDiedError`` if an actor of the graph is gone, ``GraphTornDownError`` after
        :meth:`teardown`, ``ArgumentsError`` (a ``TypeError`` and a ``ValueError``) for arguments that
        do not fit the graph's inputs.

        On the inline engine all of it has run when this returns, and ``timeout`` has no effect.
        """
        __tracebackhide__ = True  # by pytest
        try:
            made: ResultT | None
            if timeout is None:
                made = self._fast_path(args, kwargs, deadline)
                if made is not None:
                    return made
            made = self._submitter.execute(args, kwargs, timeout, deadline)
            return made
        except Exception as error:
            raise trimmed(error)  # noqa: B904

    def try_execute(self, /, *args: Any, deadline: float | None = None, **kwargs: Any) -> ResultT:
        """Like :meth:`execute`, but raises ``CapacityError`` instead of waiting for room or for a ref."""
        __tracebackhide__ = True  # by pytest
        try:
            made: ResultT = self._submitter.try_execute(args, kwargs, deadline)
            return made
        except Exception as error:
            raise trimmed(error)  # noqa: B904

    def execute_async(
        self, /, *args: Any, deadline: float | None = None, **kwargs: Any
    ) -> Coroutine[Any, Any, ResultT]:
        """Like :meth:`execute`; waits for room and for refs without blocking the event loop.

        On the inline engine the loop stands still meanwhile, as it does in a debugger.
        """
        return self._submitter.execute_async(args, kwargs, deadline)

    def teardown(self, kill_actors: bool = False) -> None:
        """Take the graph down: its channels are gone when this returns, its actors are free.

        Results of executions that are over can still be got. With ``kill_actors`` the actors are killed as
        well. Safe to call more than once.
        """
        self._parts.control.teardown(kill_actors)

    def restart(self) -> None:
        """Bring a graph back whose actors have died, with the same handles and in place.

        Dead actors are started again (a new process, the constructor with the same arguments) unless
        that has been done, and the graph is deployed anew; when this returns, it can be executed.
        Executions that were in flight fail with ``ActorRestartedError`` and can be tried again;
        results of those that were over can still be got. A graph whose actors all live is left as it is. A
        graph all of whose dead actors had ``max_restarts`` left restarts itself at the next
        ``execute``.

        Raises ``ActorDiedError`` if an actor cannot be started again: it was killed by
        ``conveyor.kill()``, or its arguments were larger than 1 MiB and it was started without
        ``max_restarts``. Can be called again after that, and after Ctrl-C.
        """
        self._parts.control.restart()

    def status(self, stacks: bool = False) -> GraphStatus:
        """Say what the graph and each of its actors are doing now; ``print`` shows it.

        Costs the actors nothing, and works also when they are stuck, stopped or dead. ``stacks``: with the
        Python stack of each actor, through py-spy where that is installed.
        """
        return self._parts.control.status(stacks)

    @property
    def is_teardown(self) -> bool:
        """Whether the graph has been torn down, or its session has ended."""
        return self._parts.control.is_teardown

    def __enter__(self: G) -> G:
        self._parts.control.check_block()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.teardown()
            return
        try:
            self.teardown()
        except Exception as second:
            # The program has to hear of the first error.
            if hasattr(error, "add_note"):
                error.add_note(f"then the teardown of {self.name} failed: {second}")
            else:
                import logging  # slow to import, and rarely needed

                logging.getLogger("conveyor").warning(
                    "%s: the teardown failed: %s", self.name, second
                )

    def explain(self) -> str:
        """The Plan as text: what every actor does, in which order, over which channel, and why."""
        return self._parts.control.explain()

    def visualize(
        self,
        filename: str | os.PathLike[str] | None = "compiled_graph",
        format: str = "svg",
        view: bool = False,
        channel_details: bool = False,
        schedule: bool = True,
    ) -> str:
        """Draw the graph and, beside it, every actor's schedule, into ``filename.format``.

        format: ``"svg"``, ``"dot"``, ``"mermaid"``, or ``"ascii"``, which goes into no file.
        ``filename=None`` writes no file. ``view`` opens or prints it. Returns the DOT source for an SVG file,
        else the text. Raises ``ValueError`` for an unknown format, and ``OSError`` if the file cannot be
        written.
        """
        return self._parts.control.draw(filename, format, view, channel_details, schedule)

    def stats(self) -> conveyor.observe.GraphStats:
        """Return the counts and times of the graph since it was compiled.

        The counters are always kept, and reading them asks no actor: it works while one is busy, stopped or
        dead, and after :meth:`teardown`. Printed, they are a table.
        """
        return self._parts.control.stats()

    def trace(
        self, path: str | os.PathLike[str], *, max_events: int = 1_000_000
    ) -> conveyor.observe.Trace:
        """Write what every process of the graph does in the body of a ``with`` to ``path``.

        The file is for https://ui.perfetto.dev or ``chrome://tracing`` (trace events as JSON, with
        gzip if the name ends in ``.gz``): a track for each actor and each thread of the driver, all on
        one clock (``CLOCK_MONOTONIC``), a slice for each task, wait, receive and send, and an arrow
        for each frame. It is written when the body ends, also by an exception or with an actor dead,
        and replaces a file of that name only when it is whole.

        Args:
            max_events: slices kept at most, of all processes together; each takes 48 bytes of memory
                meanwhile. What is beyond is counted in the file's metadata and in the log.

        Raises:
            ValueError: ``max_events`` is less than 1.

        Entering raises ``RuntimeStateError`` while the graph is traced already,
        ``GraphTornDownError`` after :meth:`teardown`, ``OSError`` if no file can be made there.
        """
        return self._parts.control.trace(path, max_events)

    def simulate(
        self,
        durations: float | Mapping[str, float] | Callable[[str, int], float] | None = None,
        *,
        executions: int | None = None,
        depth: int | None = None,
        overlap: bool | None = None,
        bandwidth: float | None = None,
        latency: float | None = None,
        sizes: float | Mapping[str, float] | None = None,
        pace: float | None = None,
    ) -> conveyor.observe.Simulation:
        """Say what would happen if the graph were executed, with other times or settings, say.

        The Plan is followed in virtual time; nothing runs, and no actor is asked. Every actor is taken to
        have a processor of its own and to do nothing beside this graph, and a generator to find room for
        its items.

        Args:
            durations: the seconds that tasks take: one number for all; or by name, where the name is the
                label that ``stats()`` and ``explain()`` show, that label without its ``#2``, or the method's
                name, and the most exact one counts; or what is called with a task's label and the number of
                the execution (from 0). ``None``: what ``stats()`` has measured until now.
            executions: how many are simulated; ``None``: 32, or eight times the depth.
            depth: how many may be on their way at once; ``None``: the graph's.
            overlap: with the setting of this name, or without it; ``None``: as the graph was compiled.
            bandwidth: bytes in a second that a value is copied with; ``None``: what a copy from memory to
                memory takes in this process, measured once.
            latency: seconds from when a value has been sent until its reader can go on; ``None``: 10 us.
            sizes: the bytes of values: one number for all, or by what comes on the edge as ``explain()``
                names it (0 for others); ``None``: what ``stats()`` has measured (0 for a graph that has not
                run).
            pace: seconds between the submissions of two executions, where there is room; ``None``: the
                next one is submitted as soon as there is.

        Raises:
            TypeError, ValueError: an argument makes no sense, or names no task or edge of the graph.
            RuntimeStateError: durations are to be taken from ``stats()``, and some task has not run yet.
        """
        options = {
            "executions": executions,
            "depth": depth,
            "overlap": overlap,
            "bandwidth": bandwidth,
            "latency": latency,
            "sizes": sizes,
            "pace": pace,
        }
        return self._parts.control.simulate(durations, options)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._parts.reduce(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}: {self._parts.control.describe()}>"

    def _repr_html_(self) -> str:
        # Shown by a notebook.
        return self._parts.control.html(repr(self))
