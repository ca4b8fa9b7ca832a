"""Decorators: ``remote``, ``actor`` and ``method``.

At run time a handle makes its methods from their names. A type checker sees a method under ``@method`` as
a ``TypedMethod``: on an instance it is the method, on a handle it has ``remote``, ``bind`` and ``options``
with the method's own types. Ray's typed actors work in the same way.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from conveyor.api.actors import ActorClass
from conveyor.api.methods import (
    MARK,
    RECEIVED_MARK,
    SNAPSHOT_MARK,
    STREAMS_MARK,
    TRANSPORT_MARK,
    check_enabled,
    check_num_returns,
)
from conveyor.api.options import (
    METHOD_OPTIONS,
    ActorOptions,
    ActorOptionTypes,
    RemoteOptionTypes,
    check_snapshot,
    check_transport,
    take_out,
)
from conveyor.api.remote_function import RemoteFunction, checked_worker_options
from conveyor.api.retries import RETRIES_MARK, take_retries, warn_of_generator
from conveyor.dag.methods import is_generator
from conveyor.later import LaterModule
from conveyor.typevars import Unpack

if TYPE_CHECKING:
    from typing import Concatenate, ParamSpec, Protocol

    from conveyor.api.actors import ActorMethod, TypedActorClass
    from conveyor.refs.ref import Ref
    from conveyor.refs.streams import StreamRef
    from conveyor.runtime.protocol import Retries

    P = ParamSpec("P")
    T = TypeVar("T")
    ReturnT = TypeVar("ReturnT", covariant=True)
    ResultT = TypeVar("ResultT", covariant=True)

    class TypedMethod(Protocol[P, ReturnT, ResultT]):
        """A method under ``@method``."""

        @overload
        def __get__(self, instance: None, owner: type, /) -> ActorMethod[P, ResultT]: ...
        @overload
        def __get__(self, instance: object, owner: type, /) -> Callable[P, ReturnT]: ...


# Rarely needed.
into: Any = LaterModule("conveyor.direct.into")


class Mark:
    """``method(...)`` as a decorator. The type of a call follows from the type of the method."""

    def __init__(self, mark: Callable[[Any], Any]) -> None:
        self._mark = mark

    @overload
    def __call__(
        self, function: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]], /
    ) -> TypedMethod[P, Coroutine[Any, Any, T], Ref[T]]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[Any, P], AsyncIterator[T]], /
    ) -> TypedMethod[P, AsyncIterator[T], StreamRef[T]]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[Any, P], Iterator[T]], /
    ) -> TypedMethod[P, Iterator[T], StreamRef[T]]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[Any, P], T], /
    ) -> TypedMethod[P, T, Ref[T]]: ...

    def __call__(self, function: Any, /) -> Any:
        return self._mark(function)


@overload
def method(
    function: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]], /
) -> TypedMethod[P, Coroutine[Any, Any, T], Ref[T]]: ...
@overload
def method(
    function: Callable[Concatenate[Any, P], AsyncIterator[T]], /
) -> TypedMethod[P, AsyncIterator[T], StreamRef[T]]: ...
@overload
def method(
    function: Callable[Concatenate[Any, P], Iterator[T]], /
) -> TypedMethod[P, Iterator[T], StreamRef[T]]: ...
@overload
def method(function: Callable[Concatenate[Any, P], T], /) -> TypedMethod[P, T, Ref[T]]: ...
@overload
def method(
    *,
    num_returns: Literal[1, "streaming"] = 1,
    tensor_transport: str | None = None,
    snapshot: bool = False,
    receive_into: Mapping[str, str | Callable[[Any], Any]] | None = None,
    max_task_retries: int | None = None,
    retry_exceptions: bool | Sequence[type[BaseException]] | None = None,
    **rays: Any,
) -> Mark: ...
@overload
def method(
    *,
    num_returns: int,
    tensor_transport: str | None = None,
    snapshot: bool = False,
    receive_into: Mapping[str, str | Callable[[Any], Any]] | None = None,
    max_task_retries: int | None = None,
    retry_exceptions: bool | Sequence[type[BaseException]] | None = None,
    **rays: Any,
) -> Callable[[Callable[Concatenate[Any, P], T]], TypedMethod[P, T, list[Ref[Any]]]]: ...


def method(
    *function: Any,
    num_returns: int | Literal["streaming"] = 1,
    tensor_transport: str | None = None,
    snapshot: bool = False,
    receive_into: Mapping[str, str | Callable[[Any], Any]] | None = None,
    max_task_retries: int | None = None,
    retry_exceptions: bool | Sequence[type[BaseException]] | None = None,
    **rays: Any,
) -> Any:
    """Declare how an actor's method is called. ::

        @conveyor.remote
        class Splitter:
            @conveyor.method(num_returns=2)
            def split(self, batch):
                return batch[::2], batch[1::2]

        even, odd = splitter.split.remote(batch)

    Under ``@conveyor.method`` alone a method is called as without it. Type checkers and editors know its
    types then, on handles of classes under ``@conveyor.actor``.

    Args:
        num_returns: how many values the method returns separately, each with a reference (or a
            graph node) of its own. ``"streaming"``: the
            method returns a generator, or is one, and its items stream.
        tensor_transport: the tensors and arrays that a call returns stay with the actor; whoever needs them
            fetches them there. ``"auto"`` leaves the way to us; a name of ``conveyor.transport`` asks for
            that transport. See the guide's page on direct objects.
        snapshot: with a transport: what stays is a copy, as the value was when it was returned. Otherwise
            it is the actor's own memory, and what it writes there later is seen by whoever fetches it
            after that.
        receive_into: arguments that are received into tensors and arrays which the actor has already, by the
            names of their parameters: for each the attribute that has them (``"weights"``, or a path, also of
            a method without arguments: ``"model.state_dict"``), or a function of the actor. They take what
            ``get(into=)`` takes. The method finds these very objects in its argument. A call whose argument
            does not fit raises ``ValueError``; the method has not run then, and nothing has been written.
        max_task_retries: how often a call is made again by itself whose actor has died and is started again
            (``max_restarts``), behind the calls that were sent meanwhile (-1: without limit; ``None``: as
            ``remote(max_task_retries=)`` says). What the method has done until then is done twice. Calls of
            generators, and tasks of graphs, are not made again.
        retry_exceptions: whether a call is made again, within the same number of times, also where the
            method has raised; or the classes of exceptions after which it is.
        rays: other options of Ray's, which have nothing to do here and are taken with a warning.

    Raises:
        TypeError: an option that does not exist, or ``receive_into`` is of no method of an instance.
        ValueError: no such transport, or no such parameter.
    """
    if function:
        if len(function) > 1 or not (callable(function[0]) or hasattr(function[0], "__func__")):
            raise TypeError("method is used as @method, or by name as in @method(num_returns=2)")
        return _mark(function[0], num_returns, None, False, None)
    retry_options = {"max_task_retries": max_task_retries, "retry_exceptions": retry_exceptions}
    retries = take_retries(retry_options, None)
    take_out(rays, METHOD_OPTIONS, "a method")
    for name in rays:
        raise TypeError(
            f"unknown method option {name!r}; known are max_task_retries, num_returns, receive_into, "
            "retry_exceptions, snapshot, tensor_transport"
        )
    # Whether it is one is looked at once the method is there.
    check_num_returns(num_returns, True, "a method")
    transport = check_transport(tensor_transport)
    check_snapshot(snapshot, transport)
    targets = _checked_targets(receive_into)
    return Mark(
        lambda function: _mark(
            _receiving(function, targets) if targets else function,
            num_returns,
            transport,
            snapshot,
            retries,
        )
    )


def _checked_targets(targets: Any) -> dict[str, Any]:
    if targets is None:
        return {}
    if not isinstance(targets, Mapping):
        raise TypeError(f"receive_into is a mapping of parameters to attributes, not {targets!r}")
    for name, target in targets.items():
        if not isinstance(name, str) or not (isinstance(target, str) or callable(target)):
            raise TypeError(
                "receive_into has for a parameter's name the name of an attribute, or a function of the "
                f"actor; not {target!r} for {name!r}"
            )
    return dict(targets)


def _receiving(function: Any, targets: dict[str, Any]) -> Any:
    if not isinstance(function, FunctionType):
        raise TypeError(f"receive_into is for methods of an instance, not for {function!r}")
    parameters = list(inspect.signature(function).parameters.values())[1:]
    some = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = [one.name for one in parameters if one.kind not in some]
    for name in targets:
        if name not in named:
            raise ValueError(
                f"receive_into names {name!r}, which is no parameter of {function.__name__}()"
            )
    made = into.receiving(function, targets)
    setattr(made, RECEIVED_MARK, tuple(targets))
    return made


def _mark(
    function: Any,
    num_returns: int | str,
    transport: str | None,
    snapshot: bool,
    retries: Retries | None,
) -> Any:
    # A static or class method passes the mark on to nobody: it belongs on the function inside.
    inside = getattr(function, "__func__", function)
    what = f"{getattr(inside, '__qualname__', inside)}()"
    setattr(inside, MARK, check_num_returns(num_returns, True, what))
    if num_returns == "streaming":
        setattr(inside, STREAMS_MARK, True)
    if transport is not None:
        setattr(inside, TRANSPORT_MARK, transport)
        setattr(inside, SNAPSHOT_MARK, snapshot)
    if retries is not None:
        warn_of_generator(retries, is_generator(inside), what)
        setattr(inside, RETRIES_MARK, retries)
    return function


class Decorator:
    """``remote`` with options. To type checkers a class is a callable, too: the first that fits counts."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options

    @overload
    def __call__(self, made: type[T], /) -> ActorClass[T]: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(
        self, made: Callable[P, Coroutine[Any, Any, T]], /
    ) -> RemoteFunction[P, Ref[T]]: ...
    @overload
    def __call__(
        self, made: Callable[P, AsyncIterator[T]], /
    ) -> RemoteFunction[P, StreamRef[T]]: ...
    @overload
    def __call__(self, made: Callable[P, Iterator[T]], /) -> RemoteFunction[P, StreamRef[T]]: ...
    @overload
    def __call__(self, made: Callable[P, T], /) -> RemoteFunction[P, Ref[T]]: ...

    def __call__(self, made: Any, /) -> Any:
        return _remote(made, self._options)


@overload
def remote(made: type[T], /) -> ActorClass[T]: ...  # type: ignore[overload-overlap]
@overload
def remote(made: Callable[P, Coroutine[Any, Any, T]], /) -> RemoteFunction[P, Ref[T]]: ...
@overload
def remote(made: Callable[P, AsyncIterator[T]], /) -> RemoteFunction[P, StreamRef[T]]: ...
@overload
def remote(made: Callable[P, Iterator[T]], /) -> RemoteFunction[P, StreamRef[T]]: ...
@overload
def remote(made: Callable[P, T], /) -> RemoteFunction[P, Ref[T]]: ...
@overload
def remote(  # type: ignore[overload-overlap]
    *, num_returns: Literal[1, "streaming"] = 1, **options: Unpack[RemoteOptionTypes]
) -> Decorator: ...
@overload
def remote(
    *, num_returns: int, **options: Unpack[RemoteOptionTypes]
) -> Callable[[Callable[P, Any]], RemoteFunction[P, list[Ref[Any]]]]: ...


def remote(*args: Any, **options: Any) -> Any:
    """Make a class one of actors, or let a function run in other processes. ::

        @conveyor.remote
        class Echo:
            def echo(self, message):
                return message

        @conveyor.remote(num_gpus=1)
        class Stage: ...

        Echo = conveyor.remote(PlainEcho)

        @conveyor.remote
        def square(x):
            return x * x

    ``Echo.remote(...)`` then starts an actor, a process of its own with one instance of the class,
    and returns a handle of it. ``square.remote(3)`` runs the function in a worker, and
    ``square.bind(x)`` in a graph.

    The options of a class:

    - ``name``: a name to find the actor by; see ``get_actor``.
    - ``num_cpus``: the number of threads that its libraries (torch, OpenMP) use.
    - ``num_gpus``: the number of GPUs it sees.
    - ``max_concurrency``: how many of its methods may run at the same time.
    - ``max_restarts``: how often it is started again by itself when its process dies (0: never; -1:
      without limit). Its constructor runs again with the same arguments; calls that were under way
      fail with ``ActorRestartedError``.
    - ``max_task_retries``: how often such a call is made again by itself (0: never; -1: without limit);
      see ``conveyor.method``, which may say it of a single method.
    - ``env_vars``: environment variables it gets in addition to the driver's.

    Those of a function: ``num_returns``, and ``num_cpus`` and ``num_gpus`` of its worker.

    Raises:
        TypeError: what is decorated is neither class nor function, or an option does not exist.
    """
    if not args:
        # Wrong ones are found here; those of functions alone are looked at once it is known to be one.
        others = ("num_returns", "max_calls", "max_retries", "retry_exceptions")
        ActorOptions().updated(**{k: v for k, v in options.items() if k not in others})
        return Decorator(options)
    if len(args) > 1 or options:
        raise TypeError(
            "remote is used as @remote, as @remote(num_gpus=1), or as remote(Class); options for a "
            "class at hand are given with remote(Class).options(...)"
        )
    return _remote(args[0], {})


@overload
def actor(made: Callable[P, T], /) -> TypedActorClass[P, T]: ...
@overload
def actor(
    **options: Unpack[ActorOptionTypes],
) -> Callable[[Callable[P, T]], TypedActorClass[P, T]]: ...


def actor(*args: Any, **options: Any) -> Any:
    """``remote`` for classes whose actors type checkers and editors shall know. ::

        @conveyor.actor
        class Counter:
            def __init__(self, start: int = 0) -> None:
                self.count = start

            @conveyor.method
            def add(self, step: int) -> int:
                self.count += step
                return self.count

        counter = Counter.remote(start=5)
        ref = counter.add.remote(3)  # a Ref[int]

    At run time it is ``remote``. To a type checker ``Counter.remote`` has the parameters of ``__init__``,
    and its actor (an ``ActorProxy[Counter]``) has the methods that are under ``@conveyor.method``, each
    with its own parameters and result. Its other methods are plain functions to a checker.

    Raises:
        TypeError: what is decorated is no class, or an option does not exist.
    """
    if args and not isinstance(args[0], type):
        raise TypeError(
            f"actor takes classes, not {args[0]!r}; functions are made remote by remote"
        )
    decorate = remote(*args, **options)
    if args:
        return decorate

    def checked(made: Any) -> Any:
        if not isinstance(made, type):
            raise TypeError(
                f"actor takes classes, not {made!r}; functions are made remote by remote"
            )
        return decorate(made)

    return checked


def _remote(made: Any, options: Mapping[str, Any]) -> ActorClass[Any] | RemoteFunction[..., Any]:
    if isinstance(made, (ActorClass, RemoteFunction)):
        kind = "an actor class" if isinstance(made, ActorClass) else "a remote function"
        raise TypeError(f"{made!r} is {kind} already")
    if isinstance(made, type):
        check_enabled(made, options)
        return ActorClass(made, ActorOptions().updated(**options))
    if not callable(made):
        raise TypeError(f"only classes and functions can be made remote, not {made!r}")
    what = f"{getattr(made, '__qualname__', made)}()"
    streams = is_generator(inspect.unwrap(made))
    num_returns = check_num_returns(options.get("num_returns", 1), streams, what)
    worker = {name: value for name, value in options.items() if name != "num_returns"}
    return RemoteFunction(made, checked_worker_options(worker), num_returns)
