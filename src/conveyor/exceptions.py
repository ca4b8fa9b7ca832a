"""Every error Conveyor raises, under one base.

Where a standard exception family fits, the error belongs to it as well, so that
``except TimeoutError`` and ``except ValueError`` keep working.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

__all__ = [
    "ActorDiedError",
    "ActorRestartedError",
    "ActorStartError",
    "ActorUnavailableError",
    "ArenaFullError",
    "ArgumentsError",
    "CapacityError",
    "ChannelClosedError",
    "ChannelError",
    "CollectiveBrokenError",
    "CollectiveError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "ConstructorError",
    "ConveyorError",
    "ConveyorWarning",
    "DeadlineExceededError",
    "DeadlockError",
    "ExecutionCancelledError",
    "GetTimeoutError",
    "GraphError",
    "GraphTornDownError",
    "Held",
    "NodeSentError",
    "ObjectFetchTimedOutError",
    "ObjectLostError",
    "ObjectStoreFullError",
    "OutOfMemoryError",
    "OwnerDiedError",
    "RayActorError",
    "RayCgraphCapacityExceeded",
    "RayChannelError",
    "RayChannelTimeoutError",
    "RayDirectTransportError",
    "RayError",
    "RaySystemError",
    "RayTaskError",
    "RuntimeStateError",
    "SerializationError",
    "SessionEndedError",
    "SessionError",
    "SharedWriteError",
    "SystemLimitError",
    "TaskCancelledError",
    "TaskError",
    "TransportError",
    "WaitTimeoutError",
]


class ConveyorWarning(UserWarning):
    """Category of every warning of Conveyor's, for ``warnings.filterwarnings``."""


class ConveyorError(Exception):
    """Base of every error that Conveyor raises itself."""


class SessionError(ConveyorError):
    """Failure of something that the session does for a program, or cannot provide: a channel, a transport,
    room, a resource that the system limits, or the session itself. Code of the program has not raised, and no
    actor has died."""


class GraphError(ConveyorError, ValueError):
    """A graph is not valid: raised at ``bind`` or ``compile``, before any process is touched."""


class SerializationError(ConveyorError, TypeError):
    """A value cannot be pickled, or a received value cannot be unpickled."""


class ArgumentsError(ConveyorError, TypeError, ValueError):
    """Arguments do not fit: those of a graph's ``execute``, or what ``get`` or ``wait`` is given."""


class NodeSentError(GraphError, SerializationError):
    """A graph node is among what should be pickled: in an object that ``bind`` does not look into, or
    in the arguments of ``remote``."""


class ChannelError(SessionError):
    """A channel cannot be used: it is closed, its graph was torn down, or a wait for it took too long."""


class ChannelClosedError(ChannelError, RuntimeError):
    """An end of a channel is closed: this one, or the other one, and all that was sent has been received."""


class TransportError(ChannelError):
    """Tensors could not be moved from one actor to another. The message says which, by which transport."""


class CollectiveError(ConveyorError):
    """An operation of a collective group has not taken place at this rank."""


class CollectiveMismatchError(CollectiveError, ValueError):
    """The ranks of a group have not called the same operation, or not for tensors of the same shape and type.
    Every rank gets this, nothing was moved, and the group can be used as before."""


class CollectiveBrokenError(CollectiveError, RuntimeError):
    """A collective group can do nothing any more: a rank has died, has raised, or was interrupted in an
    operation, or the group was destroyed. Tensors of the operation may be half written."""


class CollectiveTimeoutError(CollectiveError, TimeoutError):
    """The others have not come to an operation within its ``timeout``. That breaks the group."""


class WaitTimeoutError(ChannelError, TimeoutError):
    """A wait with a timeout ended before its result was there. The same wait can be tried again."""


class DeadlineExceededError(ConveyorError, TimeoutError):
    """An execution's deadline has passed. The message says which tasks had run and which had not."""


if TYPE_CHECKING:
    from concurrent.futures import CancelledError

    class ExecutionCancelledError(ConveyorError, CancelledError):
        """An execution, or a call, was cancelled. Also a ``concurrent.futures.CancelledError``."""

    TaskCancelledError = ExecutionCancelledError


def __getattr__(name: str) -> Any:
    if name == "TaskCancelledError":
        name = "ExecutionCancelledError"
    if name != "ExecutionCancelledError":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Made when it is asked for: concurrent.futures is slow to import.
    from concurrent.futures import CancelledError

    made = type(
        name,
        (ConveyorError, CancelledError),
        {
            "__module__": __name__,
            "__doc__": "An execution, or a call, was cancelled. "
            "Also a ``concurrent.futures.CancelledError``.",
        },
    )
    return globals().setdefault(name, made)


class CapacityError(SessionError, RuntimeError):
    """No room for another execution now, and the caller asked not to wait for it."""


class Held(NamedTuple):
    """Values that fill an arena, all of one channel and held by one process.

    process: who holds them, by name.
    graph, edge: the channel's numbers; ``None`` for calls.
    channel: the channel in words.
    executions: the numbers of the executions (or calls) that they belong to.
    bytes: what they take together.
    """

    process: str
    graph: int | None
    edge: int | None
    channel: str
    executions: tuple[int, ...]
    bytes: int


class ArenaFullError(ConveyorError, MemoryError):
    """The session's memory cap is reached (or a graph's own); the message says which values hold it.

    ``held`` says the same for programs: those who hold most come first. It lists values of the raising
    process only, which alone knows what it has sent. It is empty where the memory is other processes':
    the message then gives the bytes of each one's arena, as ``graph.stats().arena_bytes`` does, and
    who sends from there next is told who holds what.
    """

    #: What has no room now for a value that is not too large for it. 1: the graph's cap, 2: the session's.
    _cap = 0

    def __init__(self, message: str, held: tuple[Held, ...] = ()) -> None:
        super().__init__(message)
        self.held = held

    def __reduce__(self) -> tuple[type, tuple[str, tuple[Held, ...]]]:
        return (type(self), (str(self), self.held))


class OutOfMemoryError(ConveyorError, MemoryError):
    """The system has refused memory, or addresses, to a process (``ulimit -v``, ``vm.max_map_count``).

    The session's memory cap is another thing: :class:`ArenaFullError`. A ``get`` that raises this
    itself can be tried again; in a task it is that task's error.
    """


class ObjectLostError(ConveyorError, RuntimeError):
    """A value that stayed where it was made is not there any more, though its process lives: whoever owned
    the reference to it has died, or the session in which it was made has ended."""


class InjectedFault(Exception):
    """Failure that a test has asked for (``conveyor.testing``)."""


class SharedWriteError(ConveyorError, RuntimeError):
    """Memory of a value that stays where it was made was written to while others could fetch it. Raised
    where a session looks for that: ``conveyor.init(debug_writes=True)``."""


class GraphTornDownError(ChannelError, RuntimeError):
    """A graph is used after its ``teardown()``."""


class RuntimeStateError(SessionError, RuntimeError):
    """The library's state does not allow it (after ``shutdown``, in a forked child)."""


class SessionEndedError(RuntimeStateError):
    """The session has ended, by ``shutdown()`` or with the program: nothing of it can be had any more."""


class SystemLimitError(SessionError, OSError):
    """A limit of the system keeps the session from what it needs: descriptors, addresses, sizes of files,
    processes. The message names the limit, how high it is, and what to do; ``errno`` is the system's."""

    def __str__(self) -> str:
        return str(self.args[1]) if len(self.args) == 2 else super().__str__()


class DeadlockError(ConveyorError, RuntimeError):
    """Actors wait for each other in a cycle; the message names the cycle.

    ``cycle`` holds the actors' names in waiting order.
    """

    def __init__(self, message: str, cycle: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.cycle = cycle

    def __reduce__(self) -> tuple[type, tuple[str, tuple[str, ...]]]:
        return (type(self), (str(self), self.cycle))


class ActorDiedError(ConveyorError, RuntimeError):
    """An actor's process is gone.

    ``actor`` is the actor's name, ``node`` the graph node or method it was running when it died
    (``None`` if it was idle), ``exit_code`` and ``signal`` how it ended (``None`` while not known).
    """

    def __init__(
        self,
        message: str,
        actor: str = "",
        node: str | None = None,
        exit_code: int | None = None,
        signal: int | None = None,
    ) -> None:
        super().__init__(message)
        self.actor = actor
        self.node = node
        self.exit_code = exit_code
        self.signal = signal

    def __reduce__(self) -> tuple[type, tuple[str, str, str | None, int | None, int | None]]:
        return (type(self), (str(self), self.actor, self.node, self.exit_code, self.signal))


class ActorStartError(ActorDiedError):
    """An actor's process could not be started."""


class ActorRestartedError(ActorDiedError):
    """An actor's process is gone, and the actor is started again (or has been): what failed with this
    can be tried again. Whether the call had taken effect before the end is not known."""


class TaskError(ConveyorError):
    """An exception raised by user code in an actor.

    What reaches the caller is an instance of both ``TaskError`` and the user's exception class, so
    ``except ValueError`` and ``except TaskError`` both work, and it has the attributes of the
    user's exception. It is a plain ``TaskError`` where that class cannot be loaded here or allows
    no subclass, and for what would steer the caller's program: ``SystemExit``,
    ``KeyboardInterrupt``, ``StopIteration``, ``asyncio.CancelledError`` and their like.

    ``cause`` is the user's exception (``None`` if it could not be carried over), ``actor`` and
    ``node`` say where it was raised, ``remote_traceback`` is the traceback as text. These four
    names win over attributes of the user's exception; ``cause`` still has those.
    """

    def __init__(
        self,
        message: str,
        cause: BaseException | None = None,
        actor: str = "",
        node: str = "",
        remote_traceback: str = "",
    ) -> None:
        # Not super(): in a subclass with the user's class, that would be the user's.
        Exception.__init__(self, message)
        self.__dict__["_origin"] = (message, cause, actor, node, remote_traceback)

    def __init_subclass__(cls, **kwargs: object) -> None:
        # Not passed on: that a user's exception travels must not run the hooks of its class.
        pass

    # A frozen dataclass as the user's class would refuse what Python's own library sets on errors.
    __setattr__ = Exception.__setattr__
    __delattr__ = Exception.__delattr__

    @property
    def cause(self) -> BaseException | None:
        return self._origin[1]

    @property
    def actor(self) -> str:
        return self._origin[2]

    @property
    def node(self) -> str:
        return self._origin[3]

    @property
    def remote_traceback(self) -> str:
        return self._origin[4]

    @property
    def _origin(self) -> tuple[str, BaseException | None, str, str, str]:
        origin: tuple[str, BaseException | None, str, str, str] = self.__dict__["_origin"]
        return origin

    def __str__(self) -> str:
        message, _, actor, node, remote_traceback = self._origin
        where = " and ".join(
            f"{kind} {name!r}" for kind, name in (("actor", actor), ("node", node)) if name
        )
        if where:
            message += f"\n\nraised in {where}"
        if remote_traceback:
            message += ("; " if where else "\n\n") + "the traceback there:\n\n"
            message += remote_traceback.rstrip("\n")
        return message

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._origin[0]!r})"

    def __reduce__(self) -> tuple[type, tuple[str, BaseException | None, str, str, str]]:
        return TaskError, self._origin


class ConstructorError(TaskError, ActorDiedError):  # type: ignore[misc, override]
    """An actor's constructor has raised, so nothing can be had of the actor.

    The result of every call of it, and of every execution that needs it, is this, which is also an
    instance of the user's exception class, as every ``TaskError`` is. ``exit_code`` and ``signal`` are
    ``None``: the process is there, and says so to everybody.
    """

    exit_code = None
    signal = None


# Ray's names, for programs that catch these by ``ray.exceptions.X``.
RayError = ConveyorError
RayTaskError = TaskError
RayActorError = ActorDiedError
ActorUnavailableError = ActorRestartedError
RaySystemError = SessionError
RayChannelError = ChannelError
RayChannelTimeoutError = GetTimeoutError = ObjectFetchTimedOutError = WaitTimeoutError
RayDirectTransportError = TransportError
OwnerDiedError = ObjectLostError
RayCgraphCapacityExceeded = CapacityError
ObjectStoreFullError = ArenaFullError
