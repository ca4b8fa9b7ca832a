"""Actors: their classes, their handles, and the methods that handles have."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import FunctionType
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    Literal,
    NoReturn,
    ParamSpec,
    Protocol,
    TypeVar,
    cast,
    overload,
)

from conveyor.api.methods import (
    MethodEntry,
    MethodTable,
    all_by_value,
    check_enabled,
    check_num_returns,
    make_table,
    methods_of,
    signature_of,
)
from conveyor.api.options import (
    METHOD_OPTIONS,
    ActorOptions,
    ActorOptionTypes,
    check_has_transport,
    check_snapshot,
    check_transport,
    take_out,
)
from conveyor.api.retries import call_with_retries, take_retries, warn_of_generator, with_default
from conveyor.calls.call import METHOD, OPEN, RAY_CALL, count_of
from conveyor.dag.methods import bind, check_arguments
from conveyor.exceptions import RuntimeStateError
from conveyor.runtime import context, ending
from conveyor.runtime.protocol import (
    ActorId,
    ActorSpec,
    MethodInfo,
    NameTakenError,
    ResultSpec,
    Retries,
    Runtime,
)
from conveyor.typevars import InstanceT, P, ResultT, Unpack
from conveyor.user_frames import trimmed

if TYPE_CHECKING:
    from conveyor.dag import MethodNode, OutputElementNode
    from conveyor.refs.ref import Ref


CallP = ParamSpec("CallP")
CallR = TypeVar("CallR", covariant=True)
SelfT = TypeVar("SelfT")


class Call(Protocol[CallP, CallR]):
    """A call with the parameters ``CallP``. With a ref among the first four arguments by position, the types
    of the arguments are not checked. A type checker wants arguments by name to be values."""

    @overload
    def __call__(self, *args: CallP.args, **kwargs: CallP.kwargs) -> CallR: ...
    @overload
    def __call__(self, a: Ref, /, *args: Any, **kwargs: Any) -> CallR: ...
    @overload
    def __call__(self, a: Any, b: Ref, /, *args: Any, **kwargs: Any) -> CallR: ...
    @overload
    def __call__(self, a: Any, b: Any, c: Ref, /, *args: Any, **kwargs: Any) -> CallR: ...
    @overload
    def __call__(self, a: Any, b: Any, c: Any, d: Ref, /, *args: Any, **kwargs: Any) -> CallR: ...

    def __get__(self, instance: Any, owner: type, /) -> Call[CallP, CallR]:
        """Bind the call, as a method of ours, to its object."""
        ...


def takes_refs(method: Callable[Concatenate[SelfT, CallP], CallR]) -> Call[CallP, CallR]:
    """Say that refs may stand for the arguments of ``method``; changes nothing else."""
    return cast("Call[CallP, CallR]", method)


#: Stands for an option that was not given, where ``None`` means something.
_UNCHANGED: Any = ...


class ActorHandle(Generic[InstanceT]):
    """An actor: its methods are the handle's attributes.

    Handles can be kept, compared, used as dict keys, and sent to other actors. The actor ends
    after its last handle is gone, unless it has a name. A handle has no public attributes but the
    actor's methods.
    ``handle.__ray_call__.remote(function, ...)`` calls ``function(instance, ...)`` in the actor.
    """

    # Nothing public, so that every method name is free; methods are made when they are asked for,
    # because a cached one would refer back to the handle and keep the actor alive.
    __slots__ = ("__weakref__", "_class_name", "_id", "_retained", "_runtime", "_table")

    def __init__(
        self,
        runtime: Runtime,
        class_name: str,
        table: MethodTable,
        actor: ActorId,
        retained: object = None,
    ) -> None:
        self._runtime = runtime
        self._id = actor
        self._class_name = class_name
        self._table = table
        # The handle's end ends this share in the actor: see `Runtime.retain`.
        self._retained = runtime.retain(actor) if retained is None else retained

    def __getattr__(self, name: str) -> AnyMethod:
        # Python asks for many underscored names (copy, pickle, notebooks), also while there is no
        # table yet. None of them is a method but `__call__`, if the class has it.
        if name == RAY_CALL:
            return ActorMethod(self, _RAY_CALL_ENTRY)  # type: ignore[return-value]
        if name.startswith("_") and name != "__call__":
            raise AttributeError(
                f"an actor's handle has no attribute {name!r}: what starts with an underscore is "
                f"private to the actor"
            )
        entry = self._table.get(name)
        if entry is None:
            raise AttributeError(_no_method(self, name))
        kind = entry.kind
        if kind is None:
            kind = entry.kind = _kind_of(entry)
        return kind(self, entry)  # type: ignore[no-any-return]

    def __dir__(self) -> list[str]:
        return sorted([*super().__dir__(), *self._table])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ActorHandle):
            return NotImplemented
        return self._id == other._id and self._runtime is other._runtime

    def __hash__(self) -> int:
        return hash(self._id)

    def __repr__(self) -> str:
        return f"Actor({self._id.name}, {self._id.index})"

    # A handle never changes, so a copy within a process is as good as the handle itself.
    def __copy__(self) -> ActorHandle[InstanceT]:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ActorHandle[InstanceT]:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        check_usable(self)
        # Somebody else will hold one now, so the last one here is not the last.
        self._runtime.share(self._id)
        methods = {name: entry.info for name, entry in self._table.items()}
        # Actors are counted in each session anew: its number alone is another actor's in another one.
        return _unpickle, (self._runtime.exports.session, self._id, self._class_name, methods)


# handle.__ray_call__.remote(function, *args) runs function(instance, *args) in the actor.
_RAY_CALL_ENTRY = MethodEntry(MethodInfo(RAY_CALL, 1, False, False, None))


class ActorMethod(Generic[P, ResultT]):
    """A method of an actor: ``remote`` calls it now, ``bind`` makes it a task of a graph. It can be sent to
    other actors, as the handle can."""

    __slots__ = ("_entry", "_handle", "_result_spec", "_retries")

    def __init__(
        self,
        handle: ActorHandle,
        entry: MethodEntry,
        result_spec: ResultSpec | None = None,
        retries: Retries | None = _UNCHANGED,
    ) -> None:
        self._handle = handle
        self._entry = entry
        self._result_spec: ResultSpec = entry.result_spec if result_spec is None else result_spec
        self._retries = entry.info.retries if retries is _UNCHANGED else retries

    @takes_refs
    def remote(self, /, *args: P.args, **kwargs: P.kwargs) -> ResultT:
        """Call the method. References that are arguments are replaced by their values, those
        inside of arguments arrive as references.

        Returns:
            A reference to the result at once, or a list of references for ``num_returns > 1``. For a
            generator method a ``StreamRef``, which is iterated over.

        Raises:
            TypeError: the arguments do not fit the method.
        """
        __tracebackhide__ = True  # by pytest
        try:
            handle = self._handle
            runtime = handle._runtime
            if context.running() is not runtime:
                check_usable(handle)
            self._entry.check(handle._id.name, args, kwargs)
            info = self._entry.info
            retries = self._retries
            if retries is not None and retries.most and not info.is_generator:
                count = count_of(self._result_spec)
                tried: ResultT = call_with_retries(
                    runtime, handle._id, info.name, self._try, count, retries, args, kwargs
                )
                return tried
            if info.received:
                args, kwargs = self._entry.with_deferred(args, kwargs)  # type: ignore[assignment]
            started: ResultT
            result_spec = self._result_spec
            if type(result_spec) is tuple:
                check_has_transport(handle, result_spec[1])
            if info.is_generator and count_of(result_spec) == 1:
                name, is_async = info.name, info.is_async
                started = runtime.stream(
                    handle._id, name, is_async, args, kwargs, OPEN, result_spec
                )
            else:
                started = runtime.call(handle._id, info.name, args, kwargs, result_spec)
            return started
        except Exception as error:
            raise trimmed(error)  # noqa: B904

    def _try(self, args: tuple[Any, ...], kwargs: dict[str, Any], again: bool) -> Any:
        """Call the method once. ``again``: an earlier try has failed."""
        handle, info, result_spec = self._handle, self._entry.info, self._result_spec
        if info.received:
            args, kwargs = self._entry.with_deferred(args, kwargs)
        if type(result_spec) is tuple:
            check_has_transport(handle, result_spec[1])
        return handle._runtime.call(handle._id, info.name, args, kwargs, result_spec, METHOD, again)

    @overload
    def bind(
        self: ActorMethod[P, list[Ref[Any]]], /, *args: Any, **kwargs: Any
    ) -> tuple[OutputElementNode, ...]: ...
    @overload
    def bind(self, /, *args: Any, **kwargs: Any) -> MethodNode[ResultT]: ...

    def bind(self, /, *args: Any, **kwargs: Any) -> Any:
        """Make a call of the method a task of a graph; see ``InputNode``.

        Returns:
            The node of the result (a ``MethodNode``), or for ``num_returns > 1`` a tuple of as
            many nodes. The items of a generator method stream to whoever executes the graph.

        Raises:
            TypeError: the arguments do not fit the method.
        """
        check_usable(self._handle)
        return bind(
            self._handle._id,
            self._entry.info.name,
            args,
            kwargs,
            signature=self._entry.info.signature,
            num_returns=count_of(self._result_spec),
            by_reference=self._result_spec[1:] if isinstance(self._result_spec, tuple) else None,
            generator=self._entry.info.is_generator,
            by_decorator=self._entry.info.by_decorator,
            is_async=self._entry.info.is_async,
            owner=self._handle,
        )

    @overload
    def options(
        self,
        *,
        num_returns: Literal["streaming"] | None = None,
        tensor_transport: str | None = ...,
        snapshot: bool = ...,
        **rays: Any,
    ) -> ActorMethod[P, ResultT]: ...
    @overload
    def options(
        self,
        *,
        num_returns: int,
        tensor_transport: str | None = ...,
        snapshot: bool = ...,
        **rays: Any,
    ) -> ActorMethod[P, Any]: ...

    def options(
        self,
        *,
        num_returns: int | Literal["streaming"] | None = None,
        tensor_transport: Any = _UNCHANGED,
        snapshot: bool = False,
        **rays: Any,
    ) -> ActorMethod[P, Any]:
        """Return the same method with other options.

        Args:
            num_returns: how many values it returns separately; ``"streaming"``: it is a generator.
            tensor_transport: as for ``conveyor.method``; ``None``: what a call returns does not stay with the
                actor.
            snapshot: as for ``conveyor.method``.
            rays: ``max_task_retries`` and ``retry_exceptions``, as for ``conveyor.method``; other options of
                Ray's have nothing to do here and are taken with a warning.

        Raises:
            TypeError: an option that does not exist.
            ValueError: no such transport, or the actor was made with ``enable_tensor_transport=False``; or
                ``"streaming"`` is said of no generator.
        """
        retries = take_retries(rays, self._retries)
        if retries is not self._retries:
            info = self._entry.info
            warn_of_generator(retries, info.is_generator, f"{self._handle._id.name}.{info.name}")
        take_out(rays, METHOD_OPTIONS, "a method")
        for name in rays:
            raise TypeError(
                f"unknown method option {name!r}; known are max_task_retries, num_returns, "
                "retry_exceptions, snapshot, tensor_transport"
            )
        before = self._result_spec
        if num_returns is None:
            count = count_of(before)
        else:
            info = self._entry.info
            count = check_num_returns(num_returns, info.is_generator, info.name)
        if tensor_transport is _UNCHANGED:
            _, transport, snapshot_before = (
                before if isinstance(before, tuple) else (1, None, False)
            )
            check_snapshot(snapshot, transport)
            snapshot = snapshot or snapshot_before
        else:
            transport = check_transport(tensor_transport)
            if transport is not None and not self._entry.info.allows_by_reference:
                raise ValueError(
                    f"{self._handle._id.name}.{self._entry.info.name} cannot have a tensor_transport: the "
                    "actor was made with enable_tensor_transport=False"
                )
        check_snapshot(snapshot, transport)
        result_spec = count if transport is None else (count, transport, snapshot)
        return ActorMethod(self._handle, self._entry, result_spec, retries)

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        name = self._entry.info.name
        raise TypeError(
            f"methods of actors are not called directly: use handle.{name}.remote(...) for a call, "
            f"or handle.{name}.bind(...) in a graph"
        )

    def __getattr__(self, name: str) -> Any:
        # Here rather than on the class: `inspect` would take them for attributes of the class.
        if name == "__signature__" and self._entry.info.signature is not None:
            return self._entry.info.signature
        if name == "__name__":
            return self._entry.info.name
        raise AttributeError(f"{self!r} has no attribute {name!r}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ActorMethod):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[ActorHandle, str, ResultSpec, Retries | None]:
        return self._handle, self._entry.info.name, self._result_spec, self._retries

    # It never changes either.
    def __copy__(self) -> ActorMethod[P, ResultT]:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ActorMethod[P, ResultT]:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle_method, self._key()

    def __repr__(self) -> str:
        return f"<method {self._entry.info.name} of {self._handle!r}>"


if TYPE_CHECKING:
    from typing import TypeAlias

    class AnyMethod(ActorMethod[..., Any]):
        """A method of which no types are known."""

        def bind(self, /, *args: Any, **kwargs: Any) -> Any: ...
        def options(
            self,
            *,
            num_returns: int | Literal["streaming"] | None = None,
            tensor_transport: Any = ...,
            snapshot: bool = ...,
            **rays: Any,
        ) -> AnyMethod: ...

    ActorProxy: TypeAlias = type[InstanceT]
    #: What a function takes that is given an actor: its handle, as a type checker sees it.
    AnyActor: TypeAlias = ActorHandle[Any] | ActorProxy[Any]
else:
    AnyMethod = ActorMethod
    #: The handle of an actor whose class is under ``actor``. Type checkers see in it the attributes of the
    #: class, where ``@method`` has made methods of actors of them.
    ActorProxy = AnyActor = ActorHandle


def check_owner(owner: object) -> None:
    """Raise if ``owner``, which a node was bound through, is a handle that cannot be used here."""
    if isinstance(owner, ActorHandle):
        check_usable(owner)


def check_usable(handle: ActorHandle) -> None:
    """Raise unless ``handle`` belongs to the session that this process has now."""
    if context.running() is not handle._runtime:
        if ending.begun_by_others():
            raise ending.ended()
        whose = (
            "a session that has ended (it was shut down): start the actor anew"
            if handle._runtime.pid == os.getpid()
            else "the process that this one was forked from"
        )
        raise RuntimeStateError(f"{handle!r} cannot be used here: it belongs to {whose}")


def _unpickle(
    session: str, actor: ActorId, class_name: str, methods: Mapping[str, MethodInfo]
) -> ActorHandle:
    runtime = context.running()
    if runtime is None or runtime.exports.session != session:
        raise RuntimeStateError(
            f"the handle of actor {actor.name} can only be unpickled in a process of its session, "
            f"and this process {'has none' if runtime is None else 'belongs to another session'}"
        )
    return ActorHandle(runtime, class_name, make_table(methods), actor)


def _kind_of(entry: MethodEntry) -> type[ActorMethod]:
    """Make the class of a handle's methods for one name: its ``remote`` has the method's own signature and
    docstring, for ``help`` and notebooks. A class, since an attribute of each object would cost every call.
    """
    signature = entry.info.signature
    if signature is None:
        return ActorMethod
    general: Any = ActorMethod.__dict__["remote"]
    remote = FunctionType(general.__code__, general.__globals__, "remote")
    remote.__qualname__, remote.__module__ = general.__qualname__, general.__module__
    remote.__doc__ = entry.doc or general.__doc__
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    first = [own.replace(name="_" + own.name)] if "self" in signature.parameters else [own]
    remote.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*first, *signature.parameters.values()]
    )
    members = {"__slots__": (), "__doc__": entry.doc, "__module__": __name__, "remote": remote}
    return type(ActorMethod.__name__, (ActorMethod,), members)


def _unpickle_method(
    handle: ActorHandle, name: str, result_spec: ResultSpec, retries: Retries | None
) -> ActorMethod:
    method: ActorMethod = getattr(handle, name)
    return ActorMethod(handle, method._entry, result_spec, retries)


def _no_method(handle: ActorHandle, name: str) -> str:
    # Imported here: needed for nothing but this message.
    from difflib import get_close_matches

    message = f"actor {handle._id.name} (class {handle._class_name}) has no method {name!r}"
    close = get_close_matches(name, handle._table)
    if close:
        return f"{message}; did you mean {' or '.join(repr(match) for match in close)}?"
    known = ", ".join(list(handle._table)[:10]) or "none"
    return f"{message}; it has {known}{', ...' if len(handle._table) > 10 else ''}"


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
            assert name is not None
            while True:
                with suppress(ValueError):  # there is none yet
                    actor, class_name, methods, retained = runtime.find_actor(name)
                    table = make_table(methods)
                    return ActorHandle(runtime, class_name, table, actor, retained)
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
        # In no variable: an error of the constructor's may keep this frame.
        return ActorHandle(runtime, cls.__name__, self._table, *runtime.create_actor(spec))

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
        return methods if options.enable_tensor_transport else all_by_value(methods)

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
