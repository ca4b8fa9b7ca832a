"""The deployed graphs of a session, the driver's own and those that actors execute."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from io import FileIO

from msgspec import Struct, json

from conveyor import _core, descriptors
from conveyor.config import Config
from conveyor.driver.graphs.laying import Laying
from conveyor.driver.network.network import Network
from conveyor.driver.processes.record import ActorRecord
from conveyor.driver.processes.supervisor import Supervisor
from conveyor.driver.processes.table import Table
from conveyor.exceptions import ConveyorError, GraphTornDownError
from conveyor.graph.edges.layout import Tasks
from conveyor.graph.executor import Member
from conveyor.graph.telemetry.afar import PATIENCE, Afar, Question
from conveyor.plan.model import Plan
from conveyor.refs.ref import Ref
from conveyor.refs.watcher import Watcher
from conveyor.runtime import threads
from conveyor.runtime.chores import Chores
from conveyor.runtime.process import Place, Process
from conveyor.runtime.uninterrupted import uninterrupted
from conveyor.runtime.waiting.patience import Patience

#: Name of the file among the driver's descriptors.
FILE = "conveyor-roster"
#: A file with more bytes than this is written anew once it is twice as large as the deployed graphs need.
_SMALL = 1 << 16


class LaidGraph(Struct, frozen=True):
    """A graph of the session. tasks: their names, by number; ``None``: the graph has been taken down."""

    number: int
    name: str = ""
    tasks: dict[int, str] | None = None


class Roster:
    """Writer of the file that lists the deployed graphs: one line of JSON for each change."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._lines: dict[int, bytes] = {}
        self._file: FileIO | None = (
            None  # an object: what a signal handler breaks off leaves no descriptor
        )
        self._size = 0

    def note(self, number: int, name: str, tasks: Mapping[int, str]) -> None:
        """Add a graph that has been deployed. Raises ``OSError`` if there is no memory or descriptor for the
        file."""
        line = json.encode(LaidGraph(number, name, dict(tasks))) + b"\n"
        with self._lock:
            self._lines[number] = line
            self._add(line)

    def forget(self, number: int) -> None:
        """Remove a graph that has been taken down. May be called more than once."""
        with self._lock:
            if self._lines.pop(number, None) is None:
                return
            if not self._lines:
                self._replace(None)  # a session has no descriptor more for graphs that it had
                return
            try:
                self._add(json.encode(LaidGraph(number)) + b"\n")
            except (
                OSError
            ):  # a teardown goes on: tasks have numbers for names until a graph is laid
                self._replace(None)

    def close(self) -> None:
        """Close the file: the session is over."""
        with self._lock:
            self._lines.clear()
            self._replace(None)

    def _add(self, line: bytes) -> None:
        needed = sum(map(len, self._lines.values()))
        if self._file is None or self._size > max(_SMALL, 2 * needed):
            # A reader finds the one file or the other.
            file = FileIO(FILE, "w", opener=_memory_file)
            line = b"".join(self._lines.values())
            _write(file, line)
            self._replace(file)
            self._size = len(line)
            return
        try:
            _write(self._file, line)
        except BaseException:
            self._replace(None)  # what comes next would be taken for the rest of this line
            raise
        self._size += len(line)

    def _replace(self, file: FileIO | None) -> None:
        former, self._file = self._file, file
        if former is not None:
            former.close()


def _write(file: FileIO, data: bytes) -> None:
    """Write all of ``data``. The kernel may take a part, and report only the next time why it takes no
    more."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _memory_file(name: str, _flags: int) -> int:
    return descriptors.memory_file(name)


def read_roster(lines: Iterable[bytes]) -> dict[int, LaidGraph]:
    """Return the deployed graphs, by number, given the lines of the file."""
    graphs: dict[int, LaidGraph] = {}
    for line in lines:
        if not line.endswith(b"\n"):
            break  # it is being written
        graph = json.decode(line, type=LaidGraph)
        if graph.tasks is None:
            graphs.pop(graph.number, None)
        else:
            graphs[graph.number] = graph
    return graphs


class Departures:
    """Acknowledgements of actors that leave a graph, for the actors that take graphs down. An actor that
    waits for these has to know for whom it waits, so that it notices a deadlock."""

    def __init__(self, board: _core.Board, watcher: Watcher) -> None:
        self._board = board
        self._watcher = watcher
        self._awaited: dict[tuple[ActorRecord, int], list[tuple[Member, Ref]]] = {}

    def expect(self, caller: ActorRecord, number: int, acks: list[tuple[Member, Ref]]) -> None:
        """Watch the acknowledgements of graph ``number``, which ``caller`` takes down. ``caller`` is rung for
        each."""
        self._awaited[caller, number] = acks
        board, slot = self._board, caller.slot
        for _, ack in acks:
            self._watcher.watch(ack, lambda: board.ring(slot, _core.ATTENTION_BIT))

    def staying(self, caller: ActorRecord, number: int) -> list[int]:
        """Return the slots of the actors that have not left yet. Raises the error that a living actor has met
        in leaving."""
        acks = self._awaited[caller, number]
        staying = [member.slot for member, ack in acks if not ack.done()]
        if not staying:
            del self._awaited[caller, number]
            for member, ack in acks:
                try:
                    ack.get()
                except ConveyorError:
                    if member.alive:
                        raise
        return staying

    def forget(self, caller: ActorRecord) -> None:
        """Forget all acknowledgements for ``caller``, whose process is gone."""
        for key in [key for key in list(self._awaited) if key[0] is caller]:
            self._awaited.pop(key, None)


class Layer:
    """Deploys graphs and takes them down. Each graph has a number in the session."""

    def __init__(
        self,
        process: Process,
        table: Table,
        supervisor: Supervisor,
        network: Network,
        chores: Chores,
    ) -> None:
        self._process = process
        self._table = table
        self._supervisor = supervisor
        self._network = network
        self._chores = chores
        self._numbers = itertools.count(1)
        self._layings: dict[int, Laying] = {}
        self._roster = Roster()

    def __len__(self) -> int:
        return len(self._layings)

    def lay(
        self,
        executor: Place,
        config: Config,
        plan: Plan,
        tasks: Sequence[Tasks],
        labels: Mapping[int, str],
        begun: Callable[[int], object] | None = None,
    ) -> Laying:
        """Deploy a graph that the process at ``executor`` will execute. ``begun(number)`` is called first,
        for a caller that may be interrupted before it has the result."""
        self._table.check_open()
        self._chores.do()
        number = next(self._numbers)
        if begun is not None:
            begun(number)
        laying = Laying(
            self._supervisor,
            self._table,
            self._network,
            self._chores,
            number,
            config,
            plan,
            tasks,
            labels,
            executor,
        )
        try:
            laying.begin()
            self._layings[number] = laying
            self._roster.note(number, laying.name, labels)
        except BaseException:
            self._layings.pop(number, None)
            self._roster.forget(number)
            uninterrupted(laying.unload)
            raise
        return laying

    def lay_again(self, number: int, first: int, patience: Patience) -> Laying:
        """Bring dead actors of graph ``number`` back, as long as ``patience`` lasts, and deploy the graph
        anew, for executions from ``first`` on."""
        laying = self._layings.get(number)
        if laying is None:
            raise GraphTornDownError(f"graph {number} has been torn down")
        laying.again(first, patience)
        return laying

    def comes_back(self, number: int) -> bool:
        """Whether the dead actors of graph ``number`` are started again without being asked."""
        laying = self._layings.get(number)
        return laying is not None and laying.comes_back()

    def end_unmade(self, number: int) -> None:
        """End the actors of graph ``number`` whose constructor has raised."""
        laying = self._layings.get(number)
        for record in () if laying is None else laying.records:
            self._supervisor.end_unmade(record)

    def afar(self, number: int, question: Question, patience: float) -> Afar:
        """Return the status of graph ``number``'s actors on other nodes than the executor's, as these nodes
        report it."""
        laying = self._layings.get(number)
        if laying is None:
            return Afar(why="the graph has been torn down")
        return laying.afar(question, 0 if self._table.on_hosts_thread() else patience)

    def afar_later(self, number: int, then: Callable[[Afar | Exception], object]) -> None:
        """Call ``then`` with the result of :meth:`afar`, or with the error, on a thread of its own."""
        threads.start(self._look_afar, "looks", number, then)

    def _look_afar(self, number: int, then: Callable[[Afar | Exception], object]) -> None:
        try:
            found = self.afar(number, Question(), PATIENCE)
        except Exception as error:
            then(error)
        else:
            then(found)

    def unlay(self, number: int) -> list[tuple[Member, Ref]]:
        """Take graph ``number`` down; return the acknowledgements that are still to come."""
        self._process.limit_spin(number, None)
        laying = self._layings.get(number)
        if laying is None:
            return []
        try:
            acks = laying.unload()
        except BaseException:
            uninterrupted(laying.unload)  # what is left of it
            raise
        self._roster.forget(number)
        self._layings.pop(number, None)  # last: whoever is interrupted before does it again
        return [*acks]

    def drop(self, number: int) -> None:
        """Have graph ``number`` taken down soon. Takes no lock."""
        self._chores.soon(lambda: self.unlay(number))

    def executor_ended(self, record: ActorRecord) -> None:
        """Drop the graphs that a process has executed, which has ended."""
        for number, laying in list(self._layings.items()):
            if laying.executor.slot == record.slot:
                self.drop(number)

    def label(self, graph: int, node: int) -> str | None:
        """Return the name of a graph's task, also while the graph is being deployed."""
        laying = self._layings.get(graph)
        return None if laying is None else laying.labels.get(node)

    def clear(self) -> None:
        """Forget all graphs: the session is over."""
        self._layings.clear()
        self._roster.close()
