"""Descriptions of an actor's methods, for those who do not have its class."""

from __future__ import annotations

import functools
import inspect
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from conveyor.api.retries import RETRIES_MARK
from conveyor.checks import check_count
from conveyor.dag.methods import check_arguments, is_generator
from conveyor.refs.ref import DeferredRef, Ref
from conveyor.refs.streams import StreamRef
from conveyor.runtime.protocol import MethodInfo, ResultSpec

#: Where `method` leaves what it was told; copied along by `functools.wraps`.
MARK = "__conveyor_num_returns__"
#: Likewise, whether it was told to stream: it returns a generator.
STREAMS_MARK = "__conveyor_streams__"
#: Likewise, how its results are to be moved, if they stay where they were made.
TRANSPORT_MARK = "__conveyor_tensor_transport__"
#: And whether as they were when they were returned.
SNAPSHOT_MARK = "__conveyor_snapshot__"
#: And which of its arguments it receives into memory of its own.
RECEIVED_MARK = "__conveyor_received__"


def check_num_returns(num_returns: Any, is_generator: bool, what: str) -> int:
    """Return how many results a call of ``what`` has, for the option ``num_returns``. Ray's ``"streaming"``
    is for generators.

    Raises:
        TypeError: ``num_returns`` is neither an integer nor such a text.
        ValueError: it is less than 1 or too large, or ``what`` is no generator.
    """
    if not isinstance(num_returns, str):
        return check_count(
            num_returns, "num_returns", f"from 1 to {_MOST_RETURNS}", 1, _MOST_RETURNS
        )
    if num_returns == "dynamic":
        raise ValueError(
            "num_returns='dynamic' is not taken: the items of a generator come one by one, as 'streaming'"
        )
    if num_returns != "streaming":
        raise TypeError(f"num_returns must be an integer, or 'streaming', not {num_returns!r}")
    if not is_generator:
        raise ValueError(
            f"num_returns='streaming' is for generators, and {what} is none: it has to yield its results, "
            "or to be a method with @conveyor.method(num_returns='streaming') that returns a generator"
        )
    return 1


def _may_stream(function: Any) -> bool:
    """Whether a method gives items, as far as can be told. A decorator (``functools.wraps``) most likely
    passes on what it decorates. Where it does not, a stream gives the value that it has made instead."""
    return hasattr(function, STREAMS_MARK) or is_generator(inspect.unwrap(function))


#: Each is a reference of its own, made with the call.
_MOST_RETURNS = 10_000


class MethodEntry:
    """Entry of one method in a handle's table: the ``MethodInfo``, and how many arguments always fit.

    Checking a call against a signature costs as much as sending it. A call with positional
    arguments only, which nearly all are, fits if there are ``least`` to ``most`` of them.
    """

    __slots__ = ("doc", "info", "kind", "least", "most", "result_spec")

    def __init__(self, info: MethodInfo, doc: str | None = None) -> None:
        self.info = info
        self.doc = doc
        #: The class of a handle's methods of this name, once there is one.
        self.kind: Any = None
        transport, snapshot = info.tensor_transport, info.snapshot
        self.result_spec: ResultSpec = info.num_returns
        if transport is not None:
            self.result_spec = info.num_returns, transport, snapshot
        self.least, self.most = 0.0, float("inf")
        if info.signature is None:
            return
        self.most = 0
        for parameter in info.signature.parameters.values():
            required = parameter.default is parameter.empty
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                self.least += required
                self.most += 1
            elif parameter.kind is parameter.VAR_POSITIONAL:
                self.most = float("inf")
            elif parameter.kind is parameter.KEYWORD_ONLY and required:
                self.least = float("inf")

    def with_deferred(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with stand-ins for references to memory of the method's own: their values are
        not fetched before the call."""
        deferred, received = DeferredRef, self.info.received
        names = list(self.info.signature.parameters) if self.info.signature else []

        def stand_in(name: str, value: Any) -> Any:
            is_ref = isinstance(value, Ref) and not isinstance(value, StreamRef)
            return deferred(value) if is_ref and name in received else value

        return (
            tuple([stand_in(names[i] if i < len(names) else "", a) for i, a in enumerate(args)]),
            {name: stand_in(name, a) for name, a in kwargs.items()},
        )

    def check(self, actor: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise a ``TypeError`` unless the method can be called with these arguments."""
        if not kwargs and self.least <= len(args) <= self.most:
            return
        check_arguments(f"{actor}.{self.info.name}", self.info.signature, args, kwargs)


MethodTable = Mapping[str, MethodEntry]


def make_table(methods: Mapping[str, MethodInfo], cls: type | None = None) -> MethodTable:
    """Make the table of a handle that has ``methods``; ``cls``: the actor's class, where it is at hand."""
    return {
        name: MethodEntry(info, None if cls is None else getattr(cls, name).__doc__)
        for name, info in methods.items()
    }


def methods_of(cls: type) -> dict[str, MethodInfo]:
    """The methods that a handle of an actor of class ``cls`` has.

    These are ``__call__`` and all whose name has no leading underscore, inherited ones included.
    Properties and nested classes are none.
    """
    return {name: _describe(cls, name, raw) for name, raw in _candidates(cls)}


def check_enabled(cls: type, options: Mapping[str, Any]) -> None:
    """Raise a ``ValueError`` where an actor's class has methods whose results stay with it, and its
    options forbid that, as Ray's do with ``enable_tensor_transport=False``."""
    if options.get("enable_tensor_transport") in (None, True):
        return
    for name, raw in _candidates(cls):
        inside = getattr(raw, "__func__", raw)
        if getattr(inside, TRANSPORT_MARK, None) is not None:
            raise ValueError(
                f"{cls.__name__}.{name} has a tensor_transport, and the actor has "
                "enable_tensor_transport=False"
            )


def all_by_value(methods: Mapping[str, MethodInfo]) -> Mapping[str, MethodInfo]:
    """Return the methods of an actor whose options forbid that results stay with it."""
    return {name: replace(info, allows_by_reference=False) for name, info in methods.items()}


def _candidates(cls: type) -> Iterator[tuple[str, Any]]:
    seen: set[str] = set()
    for owner in cls.__mro__:
        for name, raw in vars(owner).items():
            if name in seen or (name.startswith("_") and name != "__call__"):
                continue
            # The first in the order of resolution counts, even where it hides a method.
            seen.add(name)
            if _is_method(raw):
                yield name, raw


def _is_method(raw: Any) -> bool:
    if isinstance(raw, (staticmethod, classmethod, functools.partialmethod)):
        return True
    return callable(raw) and not isinstance(raw, type)


def _describe(cls: type, name: str, raw: Any) -> MethodInfo:
    # Not unwrapped: a decorator may have made a plain function of a coroutine.
    function = getattr(cls, name)
    return MethodInfo(
        name=name,
        num_returns=getattr(function, MARK, 1),
        is_async=inspect.iscoroutinefunction(function)
        or inspect.isasyncgenfunction(inspect.unwrap(function)),
        is_generator=_may_stream(function),
        signature=_signature(cls, name, raw),
        tensor_transport=getattr(function, TRANSPORT_MARK, None),
        snapshot=getattr(function, SNAPSHOT_MARK, False),
        received=getattr(function, RECEIVED_MARK, ()),
        retries=getattr(function, RETRIES_MARK, None),
        by_decorator=not (is_generator(function) or hasattr(function, STREAMS_MARK)),
    )


def signature_of(called: Callable[..., Any]) -> inspect.Signature | None:
    """Return the signature, or ``None`` where Python cannot tell, as for functions that are written in C."""
    try:
        return inspect.signature(called)
    except (TypeError, ValueError):
        return None


def _signature(cls: type, name: str, raw: Any) -> inspect.Signature | None:
    """Return the signature as a caller sees it, without ``self``."""
    signature = signature_of(getattr(cls, name))
    if signature is None:
        return None
    parameters = list(signature.parameters.values())
    # What is bound by the class already (or not at all) shows no `self`; an object without
    # `__get__` is called without one.
    takes_self = not isinstance(raw, (staticmethod, classmethod)) and hasattr(raw, "__get__")
    if takes_self and parameters and parameters[0].kind in _POSITIONAL:
        del parameters[0]
    return signature.replace(
        parameters=[_portable(parameter) for parameter in parameters],
        return_annotation=_annotation(signature.return_annotation),
    )


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class _Text:
    """Stands for a default value or an annotation where the class is not: it only has to print."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _portable(parameter: inspect.Parameter) -> inspect.Parameter:
    # Handles travel: they must not drag along whatever defaults and annotations refer to.
    default = parameter.default
    plain = default is parameter.empty or type(default) in (
        type(None),
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        type(...),
    )
    return parameter.replace(
        annotation=_annotation(parameter.annotation),
        default=default if plain else _Text(_repr(default)),
    )


def _annotation(annotation: Any) -> Any:
    if annotation is inspect.Signature.empty or isinstance(annotation, str):
        return annotation
    return _Text(inspect.formatannotation(annotation))


def _repr(value: Any) -> str:
    try:
        return repr(value)
    except Exception:  # a user's __repr__ may do anything
        return f"<{type(value).__name__}>"


#: A parameter that Ray adds to methods that it traces.
_RAYS_PARAMETER = "_ray_trace_ctx"


def described_here(made: Any) -> bytes:
    """Return the methods of the actor ``made``, pickled; ``None``, pickled, if it has async methods."""
    methods = {name: _of_ray(type(made), info) for name, info in methods_of(type(made)).items()}
    has_async = any(info.is_async for info in methods.values())
    return pickle.dumps(None if has_async else methods)


def _of_ray(cls: type, info: MethodInfo) -> MethodInfo:
    """Add what ``ray.method`` was told of the method, and take out the parameter that Ray adds."""
    declared = getattr(getattr(cls, info.name), "__ray_num_returns__", None)
    if isinstance(declared, int):
        info = replace(info, num_returns=declared)
    if info.signature is not None and _RAYS_PARAMETER in info.signature.parameters:
        own = [p for p in info.signature.parameters.values() if p.name != _RAYS_PARAMETER]
        info = replace(info, signature=info.signature.replace(parameters=own))
    return info
