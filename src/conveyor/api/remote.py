"""``remote``: classes become classes of actors, functions run in other processes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, overload

from conveyor.api.actor_class import ActorClass
from conveyor.api.methods import check_enabled, check_num_returns, is_generator
from conveyor.api.option_types import ActorOptionTypes, RemoteOptionTypes
from conveyor.api.options import ActorOptions
from conveyor.api.remote_function import RemoteFunction, checked_worker_options
from conveyor.typevars import Unpack

if TYPE_CHECKING:
    from typing import Literal, ParamSpec, Protocol

    from conveyor.api.actor_class import TypedActorClass
    from conveyor.refs.ref import Ref
    from conveyor.refs.streams import StreamRef

    P = ParamSpec("P")
    T = TypeVar("T")

    class Decorator(Protocol):
        """``remote`` with options. A class is a callable, too: the first that fits counts."""

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
        def __call__(
            self, made: Callable[P, Iterator[T]], /
        ) -> RemoteFunction[P, StreamRef[T]]: ...
        @overload
        def __call__(self, made: Callable[P, T], /) -> RemoteFunction[P, Ref[T]]: ...

    class DecoratorOfMany(Protocol):
        """``remote(num_returns=n)``, which is for functions."""

        def __call__(self, made: Callable[P, Any], /) -> RemoteFunction[P, list[Ref[Any]]]: ...

    class ActorDecorator(Protocol):
        """``actor`` with options."""

        def __call__(self, made: Callable[P, T], /) -> TypedActorClass[P, T]: ...


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
def remote(*, num_returns: int, **options: Unpack[RemoteOptionTypes]) -> DecoratorOfMany: ...


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
        return lambda made: _remote(made, options)
    if len(args) > 1 or options:
        raise TypeError(
            "remote is used as @remote, as @remote(num_gpus=1), or as remote(Class); options for a "
            "class at hand are given with remote(Class).options(...)"
        )
    return _remote(args[0], {})


@overload
def actor(made: Callable[P, T], /) -> TypedActorClass[P, T]: ...
@overload
def actor(**options: Unpack[ActorOptionTypes]) -> ActorDecorator: ...


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
    num_returns = check_num_returns(options.get("num_returns", 1), is_generator(made), what)
    worker = {name: value for name, value in options.items() if name != "num_returns"}
    return RemoteFunction(made, checked_worker_options(worker), num_returns)
