"""What the executions of an inline graph note, in the words of a graph over processes."""

from __future__ import annotations

from conveyor import _core
from conveyor.plan import EXECUTOR, Plan
from conveyor.runtime.graph.recording import Recording, place_recorders


class Notes:
    """Counters and events of a graph, by its places and the numbers of its edges and tasks. Times are
    nanoseconds of ``monotonic_ns``. Nobody waits for input here: a task runs when it is there."""

    def __init__(self, plan: Plan) -> None:
        places, size = place_recorders(plan, 0)
        segment = _core.Segment.create(size)
        segment.close_fd()
        self.recording = Recording(plan, "an inline graph", places, segment)
        self.submitted = 0
        self._sizes: dict[int, int] = {}
        recorders = self.recording.recorders
        self._tasks = {
            task: (recorders[place], index)
            for place, where in places.items()
            if place != EXECUTOR
            for index, task in enumerate(where.tasks)
        }
        self._receives = {
            (place, edge): (recorders[place], index)
            for place, where in places.items()
            for index, edge in enumerate(where.receives)
        }
        self._sends = {
            (place, edge): (recorders[place], index)
            for place, where in places.items()
            for index, edge in enumerate(where.sends)
        }

    def sent(
        self,
        place: int,
        edge: int,
        execution: int,
        begin: int,
        end: int,
        size: int,
        failed: bool = False,
    ) -> None:
        self._sizes[edge] = size
        recorder, index = self._sends[place, edge]
        recorder.note_send(index, execution, begin, end, size, failed)

    def received(
        self, place: int, edge: int, execution: int, begin: int, end: int, failed: bool
    ) -> None:
        recorder, index = self._receives[place, edge]
        recorder.note_receive(index, execution, begin, end, self._sizes[edge], failed)

    def ran(self, task: int, execution: int, begin: int, end: int, failed: bool) -> None:
        recorder, index = self._tasks[task]
        recorder.note_task(index, execution, begin, end, failed)

    def skipped(self, task: int) -> None:
        recorder, index = self._tasks[task]
        recorder.note_skipped(index)

    def executed(self, execution: int, begin: int) -> None:
        """An execution that began then is complete."""
        self.recording.own.note_execution(execution, begin, _core.monotonic_ns())

    def take_events(self) -> None:
        """There may be many events: make room for more."""
        if self.recording.own.tracing:
            self.recording.drain()
