"""The types of calls whose arguments may be refs, which stand for values."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

if TYPE_CHECKING:
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


class TakesRefs(Protocol[CallP, CallR]):
    """A method of ours that makes such a call."""

    def __get__(self, instance: Any, owner: type, /) -> Call[CallP, CallR]: ...


def takes_refs(method: Callable[Concatenate[SelfT, CallP], CallR]) -> TakesRefs[CallP, CallR]:
    """Say that refs may stand for the arguments of ``method``; changes nothing else."""
    return method
