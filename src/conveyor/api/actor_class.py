"""Classes whose instances are actors."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from conveyor.api.actor_handle import ActorHandle
from conveyor.api.methods import (
    MethodTable,
    check_enabled,
    make_table,
    methods_of,
    signature_of,
    with_nothing_kept,
)
from conveyor.api.option_types import ActorOptionTypes
from conveyor.api.options import ActorOptions
from conveyor.api.retries import with_default
from conveyor.dag.methods import check_arguments
from conveyor.runtime import context
from conveyor.runtime.protocol import ActorSpec, MethodInfo, NameTakenError, Runtime
from conveyor.tracebacks import trimmed
from conveyor.typevars import Unpack

if TYPE_CHECKING:
    from conveyor.api.actor_handle import ActorProxy
    from conveyor.api.arguments import CallP, takes_refs

T = TypeVar("T")

_NAMES = ("__module__", "__name__", "__qualname__", "__doc__")


class ActorClass(Generic[T]):
    """Actor class, made from a plain class by ``remote``; the plain class is ``__wrapped__``.

    A subclass of it is a plain class again, to be decorated on its own.
    """

    __wrapped__: type[T]

    def __init__(self, cls: type[T], options: ActorOptions) -> None:
        # Nothing else is asked of the class here: it may be half made. A class that refers to itself
        # (its methods start more actors of it) is received with this object among its contents.
        functools.update_wrapper(self, cls, assigned=_NAMES, updated=())
        self._options = options

    def remote(self, /, *args: Any, **kwargs: Any) -> ActorHandle[T]:
        """Start an actor with these arguments for its ``__init__``. Returns at once.

        Raises:
            TypeError: the arguments do not fit, or an option asks the engine for what only Ray has; nothing
                has been started then.
        """
        __tracebackhide__ = True  # by pytest
        try:
            check_arguments(self.__wrapped__.__name__, self._signature, args, kwargs)
            runtime = context.current()
            if not self._options.get_if_exists:
                try:
                    return self._start(runtime, args, kwargs)
                except NameTakenError as taken:
                    raise ValueError(str(taken)) from None
            name = self._options.name
            if name is None:
                raise ValueError("get_if_exists looks for an actor by its name: give it a name")
            while True:
                with suppress(ValueError):  # there is none yet
                    actor, class_name, methods = runtime.find_actor(name)
                    return ActorHandle(runtime, actor, class_name, make_table(methods))
                with suppress(NameTakenError):  # another thread or process has been faster
                    return self._start(runtime, args, kwargs)
        except Exception as error:
            raise trimmed(error)  # noqa: B904

    def _start(
        self, runtime: Runtime, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> ActorHandle[T]:
        cls, options = self.__wrapped__, self._options
        spec = ActorSpec(
            cls=cls,
            args=args,
            kwargs=kwargs,
            methods=self._methods,
            name=options.name,
            num_cpus=options.num_cpus,
            num_gpus=options.num_gpus,
            max_concurrency=options.max_concurrency,
            max_restarts=options.max_restarts,
            env_vars=dict(options.env_vars),
            placement=options.placement_for(runtime.places),
        )
        return ActorHandle(runtime, runtime.create_actor(spec), cls.__name__, self._table)

    def options(self, **options: Unpack[ActorOptionTypes]) -> ActorClass[T]:
        """Return the same class with other options; see ``remote`` for them.

        ``Stage.options(name="first").remote()`` starts an actor of that name.
        """
        check_enabled(self.__wrapped__, options)
        return ActorClass(self.__wrapped__, self._options.updated(**options))

    @functools.cached_property
    def _signature(self) -> inspect.Signature | None:
        return signature_of(self.__wrapped__)

    @functools.cached_property
    def _methods(self) -> Mapping[str, MethodInfo]:
        options = self._options
        methods = with_default(methods_of(self.__wrapped__), options.max_task_retries)
        return methods if options.enable_tensor_transport else with_nothing_kept(methods)

    @functools.cached_property
    def _table(self) -> MethodTable:
        return make_table(self._methods, self.__wrapped__)

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        name = self.__wrapped__.__name__
        raise TypeError(
            f"{name} is an actor class: start an actor with {name}.remote(...); for an ordinary "
            f"instance in this process, use {name}.__wrapped__(...)"
        )

    def __getattr__(self, name: str) -> Any:
        cls = self.__dict__.get("__wrapped__")
        # Not an attribute of the class, which would be taken for the signature of ActorClass.
        if name == "__signature__" and cls is not None and self._signature is not None:
            return self._signature
        message = f"actor class {getattr(cls, '__name__', '')} has no attribute {name!r}"
        if name == "bind":
            message += "; a graph binds methods of running actors: start one with remote() first"
        elif cls is not None and not name.startswith("_") and hasattr(cls, name):
            message += f"; the plain class has: {cls.__name__}.__wrapped__.{name}"
        raise AttributeError(message)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (self.__wrapped__,)

    def __repr__(self) -> str:
        return f"ActorClass({self.__wrapped__.__name__})"

    def __reduce__(self) -> str | tuple[Any, ...]:
        # By name where that finds this very object, as Python does for classes.
        found: Any = sys.modules.get(self.__module__)
        name: str = self.__wrapped__.__qualname__
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is self and self.__module__ not in ("__main__", "__mp_main__"):
            return name
        # The names are sent too, since the class may have none yet when this is received.
        names = {name: self.__dict__[name] for name in _NAMES}
        return ActorClass, (self.__wrapped__, self._options), names


if TYPE_CHECKING:

    class TypedActorClass(ActorClass[T], Generic[CallP, T]):
        """Result of ``actor``, as a type checker sees it."""

        @takes_refs
        def remote(self, /, *args: CallP.args, **kwargs: CallP.kwargs) -> ActorProxy[T]: ...  # type: ignore[override]
        def options(self, **options: Unpack[ActorOptionTypes]) -> TypedActorClass[CallP, T]: ...
