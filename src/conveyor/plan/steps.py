"""Steps of programs, of several kinds: what an actor does for one execution.

The kinds are a closed union. Code that treats steps by their kind does so with ``match`` and ends with
:func:`assert_never`, so the type checker finds each of these places when there is a new kind. The comment
above ``Step`` lists the places that it does not find.
"""

from __future__ import annotations

from typing import Literal, NoReturn

from msgspec import Struct

Event = tuple[Literal["frame", "tensors", "call"], int]
"""What a step can wait for: a kind, and the number of what it is about. ``("frame", e)``: the frame of an
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

    It never waits for as long as others like. Where the frame is not there it waits for ``PATIENCE`` of the
    time that the tasks between here and the receive took last, at most for ``MOST_PATIENCE`` seconds, less
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


PATIENCE = 0.05
MOST_PATIENCE = 0.005
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
