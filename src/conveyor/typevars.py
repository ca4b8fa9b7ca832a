"""Type variables of the public generic classes, and what older Pythons lack of ``typing``. A variable that is
left out is ``Any``."""

from __future__ import annotations

import sys
from types import GenericAlias
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import ParamSpec, TypeVar, Unpack

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
    if sys.version_info >= (3, 11):
        from typing import Unpack
    else:
        # For hints, which can be evaluated.
        Unpack = type("Unpack", (), {"__class_getitem__": classmethod(GenericAlias)})

#: ``ValueT`` is the type of what a ref gives, ``ItemT`` that of what a stream yields or a channel carries,
#: ``SentT`` that of what can be sent. ``ResultT`` is what starting something gives: a ref, or refs in a
#: shape. ``InstanceT`` is an actor's class. ``P`` are the parameters of a method or a function.
__all__ = ["InstanceT", "ItemT", "P", "ResultT", "SentT", "Unpack", "ValueT"]
