"""The type variables of the public generic classes. Where one is not said, it is ``Any``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import ParamSpec, TypeVar

    ValueT = TypeVar("ValueT", covariant=True, default=Any)
    ItemT = TypeVar("ItemT", default=Any)
    ResultT = TypeVar("ResultT", covariant=True, default=Any)
    SentT = TypeVar("SentT", contravariant=True, default=Any)
    InstanceT = TypeVar("InstanceT", default=Any)
    P = ParamSpec("P", default=...)
else:
    # Defaults are known from Python 3.13 on. At run time nobody reads them.
    from typing import ParamSpec, TypeVar

    ValueT = TypeVar("ValueT", covariant=True)
    ItemT = TypeVar("ItemT")
    ResultT = TypeVar("ResultT", covariant=True)
    SentT = TypeVar("SentT", contravariant=True)
    InstanceT = TypeVar("InstanceT")
    P = ParamSpec("P")

#: ``ValueT`` is the type of what a ref gives, ``ItemT`` that of what a stream yields or a channel carries,
#: ``SentT`` that of what can be sent. ``ResultT`` is what starting something gives: a ref, or refs in a
#: shape. ``InstanceT`` is an actor's class. ``P`` are the parameters of a method or a function.
__all__ = ["InstanceT", "ItemT", "P", "ResultT", "SentT", "ValueT"]
