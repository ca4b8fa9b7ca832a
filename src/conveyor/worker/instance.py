"""The actor's object, an instance of the user's class, and the state that all parts of its process share."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from conveyor import _core
from conveyor.calls.call import METHOD, Call, find, find_method
from conveyor.calls.constructor import Constructor, call_exit_hook
from conveyor.calls.generators import OpenGenerators
from conveyor.codec import decode_error, encode_error
from conveyor.codec.direct import receiving
from conveyor.exceptions import ConveyorError
from conveyor.runtime.process import Process
from conveyor.worker.messages import WorkerBootstrap

if TYPE_CHECKING:
    from conveyor.worker.coroutines import Coroutines


class Instance:
    """Holder of the actor's object, from the constructor's call on. ``error``: the constructor's failure,
    encoded."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.started = False
        self.error: bytes | None = None
        #: Whether a call or a step of a graph was answered with ``error``.
        self.error_reported = False
        self._object: Any = None
        self._generators = OpenGenerators()

    def start(self, cls: type | Constructor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run the constructor."""
        self.started = True
        try:
            if isinstance(cls, Constructor):
                cls, args, kwargs = cls.call(args)
            self._object = cls(*args, **kwargs)
        except SystemExit:
            raise
        except BaseException as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Note that the constructor has failed, or that its call could not be read: every later call, and
        every step of a graph, answers with ``error``."""
        self.started = True
        label = f"{self.name}.__init__"
        self.error = encode_error(error, self.name, label, constructor=True, begun=False)

    def end(self, run: Callable[[Coroutine[Any, Any, Any]], object]) -> None:
        """Close open generators, call the exit hook, and let go of the object. ``run`` runs the hook's result
        if that is a coroutine. Whatever is raised meanwhile is printed."""
        self._generators.close_all()
        call_exit_hook(self._object, self.name, run)
        self._object = None

    def receive(self, read: Callable[[], Any]) -> Any:
        """Return the next call, as ``read`` gives it. The call's method will hold the values that are stored
        in this process."""
        receiving.on = True
        if receiving.taken:  # by one that was cancelled, say, before it ran
            receiving.taken = []
        try:
            call = read()
        finally:
            receiving.on = False
        if type(call) is _core.ErrorFrame:  # it comes from another host, and could not
            raise decode_error(call.meta)
        return call

    def find(self, call: Call) -> tuple[Callable[..., Any], bool]:
        """Return the callable for ``call``, and whether it is a coroutine function. Raises ``GraphError`` if
        there is none."""
        if call[4] == METHOD:
            function, is_async = find_method(self._object, call[0])
        else:
            function, is_async = find(self._object, self._generators, call)
        return (receiving.held_by(function) if receiving.taken else function), is_async

    @property
    def has_streams(self) -> bool:
        """Whether a caller may ask for more items of a generator."""
        return bool(self._generators)

    def caller_gone(self, slot: int) -> None:
        """Close the generators of a caller that is dead."""
        self._generators.caller_gone(slot)

    def method(self, name: str) -> tuple[Callable[..., Any], bool]:
        """Return the method ``name``, and whether it is a coroutine function. If the constructor has failed,
        return a function that raises the constructor's error."""
        meta = self.error
        if meta is None:
            return find_method(self._object, name)

        def failed(*_args: Any, **_kwargs: Any) -> Any:
            self.error_reported = True
            raise decode_error(meta)

        return failed, False


class WorkerState:
    """The shared state of an actor's process. It knows none of the process's parts."""

    def __init__(
        self, bootstrap: WorkerBootstrap, process: Process, instance: Instance | None = None
    ) -> None:
        """``instance``: of an attached actor, whose object exists already."""
        self.bootstrap = bootstrap
        self.process = process
        #: The function to call for each bit of the doorbell.
        self.handlers: dict[int, Callable[[], None]] = {}
        self.instance = instance or Instance(bootstrap.name)
        #: Where coroutines run, if the actor has async methods.
        self.coroutines: Coroutines | None = None


class Abandoned(ConveyorError):
    """Outcome of an execution or call that waits here for something after nobody waits for it any more."""


def until(limits: _core.Limits, number: int) -> int:
    """Return when an execution or a call is over at the latest, on the monotonic clock in nanoseconds; 0: at
    no time. Below 0: nobody waits for it any more. A failed execution counts as waited for: its failure says
    more."""
    if limits.cancelled(number) and not limits.failed(number):
        return -1
    deadline = limits.deadline(number)
    return -1 if 0 < deadline <= _core.monotonic_ns() else deadline
