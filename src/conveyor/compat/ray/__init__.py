"""Ray's module names, defaults and texts over ours: ``import conveyor.compat.ray as ray``.

``import conveyor as ray`` runs the same programs. This module also raises errors that Ray raises and Conveyor
has no need for, since programs may rely on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import conveyor
import conveyor.compat.ray.experimental as _experimental
from conveyor import *  # noqa: F403
from conveyor.api.options import check_transport
from conveyor.direct.managers.registry import is_two_sided
from conveyor.refs.ref import Ref, located

__all__ = [*conveyor.__all__, "experimental", "get", "put"]

# Replaces our module of that name, which `import *` has brought.
experimental = _experimental  # type: ignore[misc]

#: Transports that Ray's ``get`` does not support: both ends would have to take part.
_OF_GROUPS = frozenset(("gloo", "nccl"))


def get(  # type: ignore[no-redef]
    refs: Any,
    *,
    timeout: float | None = None,
    _use_object_store: bool = False,
    _tensor_transport: str | None = None,
) -> Any:
    """Do the same as ``conveyor.get``, but refuse what Ray's ``get`` refuses.

    Raises:
        ValueError: the value has stayed on its actor, for a transport that needs a group, and neither
            ``_use_object_store=True`` nor ``_tensor_transport="object_store"`` is given.
    """
    named = None if _tensor_transport is None else check_transport(_tensor_transport)
    if _use_object_store or (_tensor_transport is not None and named is None):
        return conveyor.get(refs, timeout=timeout)
    _refuse_groups(refs)
    # References that are not done yet are checked afterwards: all are got together, since the timeout and the
    # first error are those of all.
    values = conveyor.get(refs, timeout=timeout)
    _refuse_groups(refs)
    return values


def put(  # type: ignore[no-redef]
    value: Any,
    *,
    tensor_transport: str | None = None,
    snapshot: bool = False,
    _tensor_transport: str | None = None,
) -> Any:
    """Do the same as ``conveyor.put``, but refuse what Ray's ``put`` refuses.

    Raises:
        TypeError: as for ``conveyor.put``.
        ValueError: the transport needs a group.
    """
    for requested in (tensor_transport, _tensor_transport):
        if check_transport(requested) in _OF_GROUPS:
            raise ValueError(
                f"put() takes one-sided transports only, such as nixl: {requested!r} is two-sided: both ends "
                "would have to take part"
            )
    return conveyor.put(
        value,
        tensor_transport=tensor_transport,
        snapshot=snapshot,
        _tensor_transport=_tensor_transport,
    )


def _refs(refs: Any) -> list[Any]:
    if isinstance(refs, Ref):
        return [refs]
    if isinstance(refs, Mapping):
        return list(refs.values())
    return list(refs) if isinstance(refs, Sequence) else []


def _refuse_groups(refs: Any) -> None:
    for ref in _refs(refs):
        if isinstance(ref, Ref) and ref.done() and not ref.has_failed():
            _refuse_group(ref)


def _refuse_group(ref: Ref) -> None:
    where = located(ref.to_send())
    if where is not None and (where.transport in _OF_GROUPS or is_two_sided(where.transport)):
        raise ValueError(
            "Currently ray.get() only supports OBJECT_STORE and NIXL tensor transport, got "
            f"TensorTransportEnum.{where.transport.upper()}, please specify the correct tensor transport in "
            "ray.get()"
        )
