"""Functions that run in other processes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, overload

from conveyor.api.actors import ActorClass, ActorHandle, AnyActor, check_usable, takes_refs
from conveyor.api.methods import check_num_returns, signature_of
from conveyor.api.options import (
    FUNCTION_OPTIONS_WITHOUT_EFFECT,
    ActorOptions,
    FunctionOptionTypes,
    take_out,
)
from conveyor.calls.call import ASYNC_FUNCTION, FUNCTION, OPEN_FUNCTION
from conveyor.codec.pickling import definitions
from conveyor.dag.methods import UNPLACED, Function, bind, check_arguments, function_of
from conveyor.exceptions import GraphError
from conveyor.runtime import context
from conveyor.typevars import P, ResultT, Unpack
from conveyor.user_frames import trimmed

if TYPE_CHECKING:
    from conveyor.dag import MethodNode, OutputElementNode
    from conveyor.refs.ref import Ref

_NAMES = ("__module__", "__name__", "__qualname__", "__doc__")
_WORKER_OPTIONS = ("num_cpus", "num_gpus")


class FunctionWorker:
    """Runs functions."""


class AsyncFunctionWorker:
    """Runs functions, coroutine functions among them."""

    async def ready(self) -> None:
        """Do nothing. (An actor with an async method has an event loop.)"""


# How they are called in messages and in status: like no class of a user's.
FunctionWorker.__name__ = AsyncFunctionWorker.__name__ = "<functions>"


class RemoteFunction(Generic[P, ResultT]):
    """Remote function, made from a plain function by ``remote``; the plain function is ``__wrapped__``."""

    __wrapped__: Callable[..., Any]

    def __init__(
        self,
        function: Callable[..., Any],
        worker: Mapping[str, Hashable],
        num_returns: int,
        on: ActorHandle | None = None,
    ) -> None:
        functools.update_wrapper(self, function, updated=())
        self._worker = dict(worker)
        self._num_returns = num_returns
        self._on = on
        self._function = function_of(function, worker)
        if isinstance(function, FunctionType) and function.__closure__ is None:
            definitions.remote_functions.add(function)

    @takes_refs
    def remote(self, /, *args: P.args, **kwargs: P.kwargs) -> ResultT:
        """Call the function in a process of its own kind (or in the actor chosen with ``on``), which is
        kept for later calls. References that are arguments are replaced by their values.

        Returns:
            A reference to the result at once; a list of references for ``num_returns > 1``, and a
            ``StreamRef`` for a generator.
        """
        __tracebackhide__ = True  # by pytest
        try:
            self._check(args, kwargs)
            started: ResultT = call_function(
                self._function, self._on, args, kwargs, self._num_returns
            )
            return started
        except Exception as error:
            raise trimmed(error)  # noqa: B904

    @overload
    def bind(
        self: RemoteFunction[P, list[Ref[Any]]], /, *args: Any, **kwargs: Any
    ) -> tuple[OutputElementNode, ...]: ...
    @overload
    def bind(self, /, *args: Any, **kwargs: Any) -> MethodNode[ResultT]: ...

    def bind(self, /, *args: Any, **kwargs: Any) -> Any:
        """Make a call of the function a task of a graph. The graph starts a worker for it, unless an
        actor was chosen with ``on``; see ``Config.function_workers``.

        Returns:
            The node of the result, or for ``num_returns > 1`` a tuple of as many nodes.
        """
        self._check(args, kwargs)
        if self._on is not None:
            check_usable(self._on)
        return bind(
            UNPLACED if self._on is None else self._on._id,
            self._function.name,
            args,
            kwargs,
            num_returns=self._num_returns,
            generator=self._function.is_generator,
            by_decorator=self._function.by_decorator,
            is_async=self._function.is_async,
            function=self._function,
            owner=self._on,
        )

    @overload
    def options(
        self,
        *,
        num_returns: Literal["streaming"] | None = None,
        on: AnyActor | None = None,
        **worker: Unpack[FunctionOptionTypes],
    ) -> RemoteFunction[P, ResultT]: ...
    @overload
    def options(
        self,
        *,
        num_returns: int,
        on: AnyActor | None = None,
        **worker: Unpack[FunctionOptionTypes],
    ) -> RemoteFunction[P, Any]: ...

    def options(
        self,
        *,
        num_returns: int | Literal["streaming"] | None = None,
        on: AnyActor | None = None,
        **worker: Unpack[FunctionOptionTypes],
    ) -> RemoteFunction[P, Any]:
        """Return the same function with other options.

        Args:
            num_returns: how many values it returns separately; ``"streaming"``: it is a generator.
            on: the actor to run it in, between its methods.
            **worker: ``num_cpus`` and ``num_gpus`` of its worker, as for actors.
        """
        count = self._num_returns
        if num_returns is not None:
            count = check_num_returns(
                num_returns, self._function.is_generator, f"{self._function.name}()"
            )
        actor: AnyActor | None = self._on if on is None else on
        if actor is not None:
            if not isinstance(actor, ActorHandle):
                raise TypeError(f"on must be an actor's handle, not {type(actor).__name__}")
            if self._function.is_async and not any(e.info.is_async for e in actor._table.values()):
                raise GraphError(
                    f"{self._function.name} is a coroutine function, and {actor!r} has no event loop: none "
                    f"of its methods is async"
                )
        return RemoteFunction(
            self.__wrapped__,
            {**self._worker, **checked_worker_options(worker)},
            count,
            actor,
        )

    def _check(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        check_arguments(self._function.name, self._signature, args, kwargs)

    @functools.cached_property
    def _signature(self) -> inspect.Signature | None:
        return signature_of(self.__wrapped__)

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        name = self._function.name
        raise TypeError(
            f"{name} is a remote function: use {name}.remote(...), {name}.bind(...) in a graph, or "
            f"{name}.__wrapped__(...) in this process"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # The names are sent too: a function that refers to itself has none yet when this is received.
        names = {name: self.__dict__[name] for name in _NAMES if name in self.__dict__}
        return (
            RemoteFunction,
            (self.__wrapped__, self._worker, self._num_returns, self._on),
            names,
        )

    def __repr__(self) -> str:
        return f"RemoteFunction({self._function.name})"


def checked_worker_options(options: Mapping[str, Any]) -> dict[str, Hashable]:
    """Check ``options`` of a function's worker and return them; ``TypeError`` for one that does not exist."""
    options = dict(options)
    take_out(options, FUNCTION_OPTIONS_WITHOUT_EFFECT, "a function")
    for name in options:
        if name not in _WORKER_OPTIONS:
            known = ", ".join(("num_returns", *_WORKER_OPTIONS))
            raise TypeError(f"unknown option {name!r} of a function; known are {known}")
    ActorOptions().updated(**options)
    return options


def call_function(
    function: Function,
    on: ActorHandle | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    num_returns: int,
) -> Any:
    """Call ``function`` in the actor ``on``, or in a worker of this process."""
    runtime = context.current()
    name, args = function.name, (function.call, *args)
    streams = function.is_generator and num_returns == 1
    what = ASYNC_FUNCTION if function.is_async and not function.is_generator else FUNCTION
    actor = on
    if actor is None:
        start = partial(start_worker, function.is_async, function.options)
        functions = runtime.functions(function.worker, start)
        if not (streams or function.is_async):
            return functions.call((name, args, dict(kwargs) if kwargs else None, num_returns, what))
        actor = functions.least_busy()
    check_usable(actor)
    if streams:
        return runtime.stream(actor._id, name, function.is_async, args, kwargs, OPEN_FUNCTION)
    return runtime.call(actor._id, name, args, kwargs, num_returns, what)


def start_worker(is_async: bool, options: Iterable[tuple[str, Hashable]]) -> ActorHandle:
    """Start a worker for functions with these options."""
    worker: type = AsyncFunctionWorker if is_async else FunctionWorker
    return ActorClass(worker, ActorOptions().updated(**dict(options))).remote()
