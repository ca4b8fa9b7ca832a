"""Every error Conveyor raises, under one base.

Where a standard exception family fits, the error belongs to it as well, so that
``except TimeoutError`` and ``except ValueError`` keep working.
"""

from __future__ import annotations

__all__ = [
    "ActorDiedError",
    "ActorStartError",
    "ArenaFullError",
    "CapacityError",
    "ChannelClosedError",
    "ConveyorError",
    "DeadlockError",
    "GraphError",
    "GraphTornDownError",
    "RuntimeStateError",
    "SerializationError",
    "TaskError",
    "WaitTimeoutError",
]


class ConveyorError(Exception):
    """Base of every error that Conveyor raises itself."""


class GraphError(ConveyorError, ValueError):
    """A graph is not valid: raised at ``bind`` or ``compile``, before any process is touched."""


class SerializationError(ConveyorError, TypeError):
    """A value cannot be pickled, or a received value cannot be unpickled."""


class WaitTimeoutError(ConveyorError, TimeoutError):
    """A wait with a timeout ended before its result was there. The same wait can be tried again."""


class CapacityError(ConveyorError, RuntimeError):
    """No room for another execution now, and the caller asked not to wait for it."""


class ArenaFullError(ConveyorError, MemoryError):
    """The memory cap of a process's arena is reached; the message says which values still hold it."""


class ChannelClosedError(ConveyorError, RuntimeError):
    """The channel's other side has closed it."""


class GraphTornDownError(ConveyorError, RuntimeError):
    """A graph is used after its ``teardown()``."""


class RuntimeStateError(ConveyorError, RuntimeError):
    """The library is used in a state that does not allow it (after ``shutdown``, in a forked child)."""


class DeadlockError(ConveyorError, RuntimeError):
    """Actors wait for each other in a cycle; the message names the cycle.

    ``cycle`` holds the actors' names in waiting order.
    """

    def __init__(self, message: str, cycle: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.cycle = cycle

    def __reduce__(self) -> tuple[type, tuple[str, tuple[str, ...]]]:
        return (type(self), (str(self), self.cycle))


class ActorStartError(ConveyorError, RuntimeError):
    """An actor's process could not be started."""


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


class TaskError(ConveyorError):
    """An exception raised by user code in an actor.

    What reaches the caller is an instance of both ``TaskError`` and the user's exception class
    (where that class allows a subclass), so ``except ValueError`` and ``except TaskError`` both work.
    ``cause`` is the user's exception (``None`` if it could not be pickled), ``actor`` and ``node``
    say where it was raised, ``remote_traceback`` is the traceback as text.
    """

    cause: BaseException | None
    actor: str
    node: str
    remote_traceback: str

    def __init__(
        self,
        message: str,
        cause: BaseException | None = None,
        actor: str = "",
        node: str = "",
        remote_traceback: str = "",
    ) -> None:
        super().__init__(message)
        self.cause = cause
        self.actor = actor
        self.node = node
        self.remote_traceback = remote_traceback

    def __reduce__(self) -> tuple[type, tuple[str, BaseException | None, str, str, str]]:
        return (
            TaskError,
            (str(self), self.cause, self.actor, self.node, self.remote_traceback),
        )
