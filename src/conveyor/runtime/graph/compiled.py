"""What ``dag.compile()`` returns, whatever engine its actors have."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from conveyor.checks import check_deadline
from conveyor.config import Config
from conveyor.exceptions import ConveyorError
from conveyor.plan import explain
from conveyor.plan.explain import counted
from conveyor.plan.model import Plan
from conveyor.runtime import views
from conveyor.runtime.graph.recording import Progress, Recording, Track
from conveyor.runtime.graph.results import Results
from conveyor.runtime.graph.status import GraphStatus
from conveyor.runtime.refs.ref import Ref, cancelled_error
from conveyor.runtime.waiting.works import Blockers
from conveyor.typevars import ResultT

if TYPE_CHECKING:
    from conveyor.observe.stats import GraphStats
    from conveyor.observe.trace import Trace

G = TypeVar("G", bound="CompiledGraph[Any]")


class CompiledGraph(ABC, Generic[ResultT]):
    """A graph whose processes, channels and schedule are laid; made by ``dag.compile()``.

    Any number of threads may execute it and get its results. Use it as a context manager, or call
    :meth:`teardown`; the actors can be used for anything else before and after.
    """

    #: For `Ref`: what results are taken out of; ``None`` where they are there from the beginning.
    gate: Any = None

    _results: Results
    #: What its processes note about themselves.
    recording: Recording

    def __init__(self, plan: Plan, config: Config, number: int) -> None:
        self.plan = plan
        self.config = config
        self._number = number
        self.cancel_with_await = config.cancel_with_await
        self.get_timeout = config.get_timeout
        self._closed: ConveyorError | None = None
        self._failure: ConveyorError | None = None

    @property
    def name(self) -> str:
        return self.config.name or f"graph {self._number}"

    def get_id(self) -> str:
        """A text that names the graph among all of its session."""
        return f"{self._number:08x}"

    @abstractmethod
    def execute(
        self,
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
        ``timeout`` (seconds, ``None`` or negative: no limit) bounds that wait with ``WaitTimeoutError``.
        ``deadline``: seconds from now in which all of it must have run (default: the one in
        ``Config``); after that, tasks that have not begun are skipped, coroutines are cancelled, and
        whoever gets a result that is not there gets ``DeadlineExceededError``. An input of the graph
        that is called ``timeout`` or ``deadline`` wins over the option.
        Raises ``ActorDiedError`` if an actor of the graph is gone, ``GraphTornDownError`` after
        :meth:`teardown`, ``ArgumentsError`` (a ``TypeError`` and a ``ValueError``) for arguments that
        do not fit the graph's inputs.

        On the inline engine all of it has run when this returns, and ``timeout`` has no effect.
        """

    @abstractmethod
    def try_execute(self, *args: Any, deadline: float | None = None, **kwargs: Any) -> ResultT:
        """Like :meth:`execute`, but raises ``CapacityError`` instead of waiting for room or for a ref."""

    @abstractmethod
    async def execute_async(
        self, *args: Any, deadline: float | None = None, **kwargs: Any
    ) -> ResultT:
        """Like :meth:`execute`; waits for room and for refs without blocking the event loop.

        On the inline engine the loop stands still meanwhile, as it does in a debugger.
        """

    @abstractmethod
    def teardown(self, kill_actors: bool = False) -> None:
        """Take the graph down: its channels are gone when this returns, its actors are free.

        Results that have arrived can still be got. With ``kill_actors`` the actors are killed as
        well. Safe to call more than once.
        """

    @abstractmethod
    def restart(self) -> None:
        """Bring a graph back whose actors have died, with the same handles and in place.

        Dead actors are started again (a new process, the constructor with the same arguments) unless
        that has been done, and the graph is laid anew; when this returns, it can be executed.
        Executions that were in flight fail with ``ActorRestartedError`` and can be tried again;
        results that had arrived can still be got. A graph whose actors all live is left as it is. A
        graph all of whose dead actors had ``max_restarts`` left restarts itself at the next
        ``execute``.

        Raises ``ActorDiedError`` if an actor cannot be started again: it was killed by
        ``conveyor.kill()``, or its arguments were larger than 1 MiB and it was started without
        ``max_restarts``. Can be called again after that, and after Ctrl-C.
        """

    @abstractmethod
    def status(self, stacks: bool = False) -> GraphStatus:
        """What the graph and each of its actors are doing now; ``print`` shows it.

        Costs the actors nothing, and works also when they are stuck, stopped or dead. ``stacks``:
        with the Python stack of each actor, through py-spy where that is installed.
        """

    @property
    def is_teardown(self) -> bool:
        return self._closed is not None

    def __enter__(self: G) -> G:
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
            # The first error is what the program has to hear of.
            if hasattr(error, "add_note"):
                error.add_note(f"then the teardown of {self.name} failed: {second}")
            else:
                import logging  # slow to import, and rarely needed

                logging.getLogger("conveyor").warning(
                    "%s: the teardown failed: %s", self.name, second
                )

    def explain(self) -> str:
        """The Plan as text: what every actor does, in which order, over which channel, and why."""
        return explain(self.plan, self.name)

    def visualize(
        self,
        filename: str | os.PathLike[str] | None = "compiled_graph",
        format: str = "svg",
        view: bool = False,
        channel_details: bool = False,
        schedule: bool = True,
    ) -> str:
        """Draw the graph and, beside it, every actor's schedule, into ``filename.format``.

        format: ``"svg"``, ``"png"`` (with the extra ``conveyor[png]``), ``"dot"``, ``"mermaid"``, or
            ``"ascii"``, which goes into no file. ``filename=None`` writes no file. ``view`` opens or prints
            it. Returns the DOT source for pictures, else the text. Raises ``ValueError`` for an unknown
            format, ``ImportError`` for PNG without that extra, and ``OSError`` if the file cannot be
            written.
        """
        return views.installed().draw(
            self.plan, filename, format, view, channel_details, schedule, self.name
        )

    def stats(self) -> GraphStats:
        """What was counted and timed since the graph was compiled.

        The counters are always kept, and reading them asks no actor: it works while one is busy,
        stopped or dead, and after :meth:`teardown`. Printed, they are a table.
        """
        return views.installed().stats(self)

    def trace(self, path: str | os.PathLike[str], *, max_events: int = 1_000_000) -> Trace:
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
        return views.installed().trace(self, path, max_events)

    @abstractmethod
    def progress(self) -> Progress:
        """How far its executions are."""

    @abstractmethod
    def tracks(self) -> list[Track]:
        """Its processes, the driver first."""

    def check_open(self) -> None:
        """Raise what has ended it, if it was closed."""
        if self._closed is not None:
            raise self._closed.with_traceback(None)

    def _seconds(self, deadline: Any, kwargs: dict[str, Any]) -> float | None:
        """The seconds that an execution has; ``deadline`` goes to ``kwargs`` if it is an input."""
        if "deadline" in self.plan.keywords:
            if deadline is not None:
                kwargs["deadline"] = deadline
            deadline = None
        if deadline is None:
            return self.config.deadline
        return check_deadline(deadline)

    # Source of its refs

    @abstractmethod
    def wait_for(self, ref: Ref, timeout: float | None) -> Any: ...

    @abstractmethod
    def is_ready(self, ref: Ref) -> bool: ...

    @abstractmethod
    def has_failed(self, ref: Ref) -> bool: ...

    @abstractmethod
    def blockers(self, ref: Ref, question: int) -> Blockers | None: ...

    def room_blockers(self, _question: int = 0) -> Blockers:
        """Who has to do something before there is room for another execution."""
        return ()

    @abstractmethod
    def cancel(self, ref: Ref) -> bool: ...

    def stopped(self, ref: Ref, overdue: bool) -> BaseException:
        return cancelled_error(self.execution(ref))

    @abstractmethod
    def doing(self) -> str: ...

    def execution(self, ref: Ref) -> str:
        """The execution that ``ref`` is of, in words."""
        number = (
            f"execution {ref._number}" if ref._number >= 0 else "an execution that was not sent"
        )
        return f"{self.name}, {number}"

    def describe(self, ref: Ref) -> str:
        position = self._results.position(ref._reader)
        output = "" if position is None else f", output {position}"
        source = self.plan.edges[self._results.edges[ref._reader]].source
        return f"{self.execution(ref)}{output} (from {source})"

    def __reduce__(self) -> Any:
        from conveyor.runtime.graph.handle import pickled  # slow to import, and rarely needed

        return pickled(self)

    def __repr__(self) -> str:
        state = "torn down" if self._closed else "failed" if self._failure else "ready"
        size = (
            f"{counted(len(self.plan.tasks), 'task')} on {counted(len(self.plan.actors), 'actor')}"
        )
        return f"<{type(self).__name__} {self.name}: {size}, {state}>"

    def _repr_html_(self) -> str:
        # What a notebook shows.
        return views.installed().html(self)
