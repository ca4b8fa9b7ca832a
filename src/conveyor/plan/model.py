"""The Plan: what a graph becomes before any process is touched.

Everything here is immutable data over one index space: actors, edges, tasks and registers are
small integers. ``explain``, the tests, the driver and the workers all read the same Plan.

The kinds are a closed union. Code that treats steps by their kind does so with ``match`` and ends with
:func:`assert_never`, so the type checker finds each of these places when there is a new kind. The comment
above ``Step`` lists the places that it does not find.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NoReturn

from msgspec import Struct

from conveyor.dag.inputs import Key

Event = tuple[Literal["frame", "tensors", "call"], int]
"""Cause of a step's wait: a kind, and the number of what it is about. ``("frame", e)``: the frame of an
execution has been published on edge e. ``("tensors", e)``: the tensors that go beside it are under way.
``("call", t)``: an actor has come to task t."""


class Recv(Struct, frozen=True):
    """Receive of one frame.

    edge: the edge that the frame comes on.
    reg: the register that a whole frame goes to; ``None`` if it is spread.
    spread: of a frame that is a tuple, the register for each element; ``None`` for one that this
        program does not use.
    """

    edge: int
    reg: int | None
    spread: tuple[int | None, ...] | None = None

    def waits_for(self) -> tuple[Event, ...]:
        """Return the events that the step waits for: it ends once all of them have happened."""
        return (("frame", self.edge),)

    def enables(self) -> tuple[Event, ...]:
        """Return the events that happen when an actor comes to the step, before it waits."""
        return ()


class Try(Struct, frozen=True):
    """Opens a receive that comes later in the program: from here on until there, the frame is taken as soon
    as it has come and the actor looks. It does so between two steps, while it waits for something else, and
    while a coroutine runs; what goes beside the frame is under way then.

    It never waits for as long as others like. Where the frame is not there it waits for ``TIME_LIMIT`` of the
    time that the tasks between here and the receive took last, at most for ``MOST_TIME`` seconds, less
    what others that are still open have waited. After ``VAIN`` waits in a row that were in vain it leaves out
    one, then two, then twice as many, up to ``MOST_LEFT_OUT``; one that was not in vain ends that.

    edge: the edge that the frame comes on.
    """

    edge: int

    def waits_for(self) -> tuple[Event, ...]:
        """Return no events: the frame comes by then or does not."""
        return ()

    def enables(self) -> tuple[Event, ...]:
        """Return no events."""
        return ()


TIME_LIMIT = 0.05
MOST_TIME = 0.005
VAIN = 3
MOST_LEFT_OUT = 64


class Await(Struct, frozen=True):
    """Waits for the tensors that travel beside a frame which was received before.

    edge: the edge of that frame.
    reg: the register that the frame went to; now it gets the value.
    """

    edge: int
    reg: int

    def waits_for(self) -> tuple[Event, ...]:
        """Return the event that the tensors beside the frame are under way."""
        return (("tensors", self.edge),)

    def enables(self) -> tuple[Event, ...]:
        """Return no events."""
        return ()


class Call(Struct, frozen=True):
    """Runs a task.

    task: the task's number.
    out: the register that the whole result goes to; ``None`` if nobody reads it. Of a generator it
        gets ``None`` (or the error) at its end.
    outs: the register of each element, where the task has a ``num_returns``; ``None`` for one that
        nobody uses.
    stream: the edge that a generator's items go out on, as they come. They may wait for room, which
        whoever reads them gives without a step of any program.
    meets: of a rank's part of an operation that ends for nobody before all have come to it, the tasks of
        all ranks.
    """

    task: int
    out: int | None
    outs: tuple[int | None, ...] = ()
    stream: int | None = None
    meets: tuple[int, ...] = ()

    def waits_for(self) -> tuple[Event, ...]:
        """Return the events that actors have come to the tasks that this one meets."""
        return tuple([("call", task) for task in self.meets])

    def enables(self) -> tuple[Event, ...]:
        """Return the event that the actor has come to the task, if it meets others."""
        return (("call", self.task),) if self.meets else ()


class Send(Struct, frozen=True):
    """Publishes a value, and starts what goes beside it. There is always room: depth is granted when an
    execution is submitted.

    edge: the edge that the frame goes out on.
    reg: the register that holds the value.
    only_done: only that the value is there is published: ``None``, or the error in its place.
    """

    edge: int
    reg: int
    only_done: bool = False

    def waits_for(self) -> tuple[Event, ...]:
        """Return no events: there is always room."""
        return ()

    def enables(self) -> tuple[Event, ...]:
        """Return the events that the frame is published and that the tensors beside it are under way."""
        return ("frame", self.edge), ("tensors", self.edge)


# The type checker does not find these places, which a new kind of step may have to be told of:
# - `plan/schedule.py` places steps; a pass that is to place the new ones has its row in `plan/schedule.py`;
# - `plan/reading.py`: `Values` and `Stage` have a field or a branch for what they tell of each kind;
# - `plan/explain.py` has words for the kinds that `reading.moves` yields;
# - `graph/telemetry/recording.py` and `graph/status.py` count and name what an `Outline`
#   lists;
# - the native program, which is told of each kind by a method (`_core.Program`).
Step = Recv | Try | Await | Call | Send


def assert_never(step: NoReturn) -> NoReturn:
    """Have the type checker prove that no kind of step comes here."""
    # Python 3.10 has none in `typing`.
    raise AssertionError(f"a step that nobody here knows: {step!r}")


#: The place, among the writers and readers of edges, of the process that executes the graph (in most programs
#: the driver). Actors count from 0.
EXECUTOR = -1


class ActorInfo(Struct, frozen=True):
    """Actor of the graph.

    index: its number.
    key: its key in the engine.
    name: its name for people; no two actors of a graph share it.
    """

    index: int
    key: Any
    name: str


class Reg(Struct, frozen=True):
    """A register of a program, where the value of an argument will stand.

    index: the register's number.
    """

    index: int


class Nested(Struct, frozen=True):
    """A container argument with nodes inside. One without nodes is a ``Const`` as a whole, so ``fill``
    need not look inside it.

    template: the container with a ``Reg`` for each node.
    """

    template: Any


class Fields(Struct, frozen=True):
    """A dataclass with nodes inside, in the template of a ``Nested``.

    instance: the dataclass with ``None`` in the fields that have nodes, so that it can be pickled.
    changed: the names of these fields, each with the template of its value.
    """

    instance: Any
    changed: tuple[tuple[str, Any], ...]


class Const(Struct, frozen=True):
    """A constant argument.

    value: what every execution gets.
    """

    value: Any


Argument = Reg | Const | Nested


class Task(Struct, frozen=True):
    """Bound call of a method or a function.

    id: its number.
    actor: the number of the actor that runs it.
    method: the name of the method or function.
    args, kwargs: the arguments of the call.
    num_returns: the number of values that its result is taken apart into; ``None``: the result is one value.
    label: its name in errors: ``"stage1.forward"``, with ``#2`` where a graph binds the same method of the
        same actor once more.
    function: the function that is called, where it is no method of the actor's.
    collective: of a collective's rank, a description of the whole collective:
        ``"allreduce(SUM) of a.grad, b.grad on a, b"``.
    """

    id: int
    actor: int
    method: str
    args: tuple[Argument, ...]
    kwargs: tuple[tuple[str, Argument], ...]
    num_returns: int | None
    label: str
    function: Callable[..., Any] | None = None
    collective: str | None = None


class Promise(Struct, frozen=True):
    """Guarantees to a reader about the tensors of an edge.

    device: the kind of device that the tensors are put on; ``None``: the one that they come from.
    static_shape: shape, dtype and device are those of the first execution.
    direct_return: each value is one tensor.
    """

    device: str | None = None
    static_shape: bool = False
    direct_return: bool = False


class Edge(Struct, frozen=True):
    """Channel from one writer to a fixed set of readers.

    id: its number.
    writer: the process that writes it: an actor's number, or ``EXECUTOR``.
    readers: the processes that read it, sorted; the writer is none of them.
    source: what people call what comes on it: ``"input"``, ``"input[0], input['k']"``, ``"a.echo"``,
        ``"a.split[1]"``.
    depth: how many slots its ring has.
    route: the name of its transport.
    reason: why this transport was chosen.
    beside: tensors travel beside the frames, by that transport; else in them.
    promise: what holds for its tensors, if anything was said about them.
    transport: what moves them, where it is the graph's own and no registered one.
    streams: where on a device its work is enqueued, see :class:`conveyor.transport.Capabilities`.
    by_reference: a transport, and whether as a snapshot, if its values stay on the writer until they are
    fetched.
    """

    id: int
    writer: int
    readers: tuple[int, ...]
    source: str
    depth: int
    route: str
    reason: str
    out_of_band: bool = False
    promise: Promise | None = None
    transport: Any = None
    streams: str | None = None
    by_reference: tuple[str, bool] | None = None


class Program(Struct, frozen=True):
    """Steps of one actor for one execution.

    actor: the actor's number.
    registers: how many registers the steps use; each of them is filled once.
    steps: the steps, in order.
    """

    actor: int
    registers: int
    steps: tuple[Step, ...]


class InputBundle(Struct, frozen=True):
    """Inputs with the same set of readers, which travel in one frame.

    edge: the edge that the frame goes out on.
    keys: what is in the frame. ``(None,)``: the frame is the whole input, as it is. ``()``: there is
        nothing in it (``None``); it starts an execution at readers that get no other input. Otherwise
        it is a tuple in this order: arguments of ``execute`` by position or name, and parts of them
        (``conveyor.dag.inputs.Path``).
    """

    edge: int
    keys: tuple[Key | None, ...]


class Passed(Struct, frozen=True):
    """A result that is a part of the input.

    key: which part; ``None``: the whole input.
    """

    key: Key | None


Leaf = int | Passed | Const
"""Result of a graph: the place of its edge in ``Plan.outputs``, a part of the input, or a constant."""


class Shape(Struct, frozen=True):
    """Form of results that are more than a list of task results.

    template: a container with a ``Reg`` for each result; its index is the result's place in ``leaves``.
    leaves: the results.
    """

    template: Any
    leaves: tuple[Leaf, ...]


class Plan(Struct, frozen=True):
    """A compiled graph as data.

    actors, tasks, edges: each stands at its own number.
    programs: one for each actor, at the actor's number.
    order: the numbers of all tasks in an order that every program keeps to; whatever a task needs is
        made before it.
    inputs: the edges that the executor writes; several with the same keys where many read these.
    outputs: the edges that it reads, one for each output in order (an edge may stand there twice).
    multi_output: a list of results is asked for, not one.
    positional, keywords: what ``execute`` must be given.
    whole_input: this is one argument, and it travels as it is.
    depth: so many executions may be under way.
    shape: the form of the results, where it is not a list.
    effects: the edges on which the executor hears that a task without a result has run.
    streams: pairs of edges: an output that says that a generator has ended, and the one on which its
        items come.
    overlap: receives of what travels beside the frames stand as early as ``plan/schedule.py`` says.
    """

    actors: tuple[ActorInfo, ...]
    tasks: tuple[Task, ...]
    edges: tuple[Edge, ...]
    programs: tuple[Program, ...]
    order: tuple[int, ...]
    inputs: tuple[InputBundle, ...]
    outputs: tuple[int, ...]
    multi_output: bool
    positional: int
    keywords: tuple[str, ...]
    whole_input: bool
    depth: int
    shape: Shape | None = None
    effects: tuple[int, ...] = ()
    streams: tuple[tuple[int, int], ...] = ()
    overlap: bool = False
