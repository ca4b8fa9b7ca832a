"""The types of calls whose arguments may be refs, which stand for values."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

if TYPE_CHECKING:
    from conveyor.refs.ref import Ref

P = ParamSpec("P")
R = TypeVar("R", covariant=True)
S = TypeVar("S")


class Call(Protocol[P, R]):
    """A call with the parameters ``P``. With a ref among the first four arguments by position, the types of
    the arguments are not checked. A type checker wants arguments by name to be values."""

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    def __call__(self, a: Ref, /, *args: Any, **kwargs: Any) -> R: ...
    @overload
    def __call__(self, a: Any, b: Ref, /, *args: Any, **kwargs: Any) -> R: ...
    @overload
    def __call__(self, a: Any, b: Any, c: Ref, /, *args: Any, **kwargs: Any) -> R: ...
    @overload
    def __call__(self, a: Any, b: Any, c: Any, d: Ref, /, *args: Any, **kwargs: Any) -> R: ...


class TakesRefs(Protocol[P, R]):
    """A method of ours that makes such a call."""

    def __get__(self, instance: Any, owner: type, /) -> Call[P, R]: ...


def takes_refs(method: Callable[Concatenate[S, P], R]) -> TakesRefs[P, R]:
    """Say that refs may stand for the arguments of ``method``; changes nothing else."""
    return method
