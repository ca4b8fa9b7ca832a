"""``remote``: classes become classes of actors, functions run in other processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar, overload

from conveyor.api.actor_class import ActorClass
from conveyor.api.methods import check_num_returns
from conveyor.api.options import ActorOptions
from conveyor.api.remote_function import RemoteFunction, checked_worker_options

T = TypeVar("T")


class _Decorator(Protocol):
    @overload
    def __call__(self, made: type[T], /) -> ActorClass[T]: ...  # type: ignore[overload-overlap]

    @overload
    def __call__(self, made: Callable[..., Any], /) -> RemoteFunction: ...


# A class is a callable, too: the first that fits counts.
@overload
def remote(made: type[T], /) -> ActorClass[T]: ...  # type: ignore[overload-overlap]


@overload
def remote(made: Callable[..., Any], /) -> RemoteFunction: ...


@overload
def remote(**options: Any) -> _Decorator: ...


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


def _remote(made: Any, options: Mapping[str, Any]) -> ActorClass[Any] | RemoteFunction:
    if isinstance(made, (ActorClass, RemoteFunction)):
        kind = "an actor class" if isinstance(made, ActorClass) else "a remote function"
        raise TypeError(f"{made!r} is {kind} already")
    if isinstance(made, type):
        return ActorClass(made, ActorOptions().updated(**options))
    if not callable(made):
        raise TypeError(f"only classes and functions can be made remote, not {made!r}")
    num_returns = options.get("num_returns", 1)
    check_num_returns(num_returns)
    worker = {name: value for name, value in options.items() if name != "num_returns"}
    return RemoteFunction(made, checked_worker_options(worker), num_returns)
