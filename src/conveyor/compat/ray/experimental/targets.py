"""Where ``ray.get`` of a reference is to put the value. Ray refuses what has not stayed on its actor."""

from __future__ import annotations

from typing import Any

import conveyor
from conveyor.direct.given import targets
from conveyor.runtime.refs.ref import Ref
from conveyor.runtime.refs.staying import located

__all__ = ["set_target_device_for_ref", "set_target_for_ref"]


def set_target_for_ref(ref: Ref, target: Any) -> None:
    """``conveyor.experimental.set_target_for_ref``. It waits for the result of a call, to see whether it has
    stayed.

    Raises:
        ValueError: the value of ``ref`` has not stayed where it was made.
    """
    _check(ref)
    targets.set_target_for_ref(ref, target)


def set_target_device_for_ref(ref: Ref, device: Any) -> None:
    """``conveyor.experimental.set_target_device_for_ref``, which waits and raises likewise."""
    _check(ref)
    targets.set_target_device_for_ref(ref, device)


def _check(ref: Any) -> None:
    if not isinstance(ref, Ref):
        return
    conveyor.wait([ref])
    # The error of a call that has failed is for who gets it.
    if not ref.has_failed() and located(ref.to_send()) is None:
        raise ValueError(f"Ref {ref!r} is not an RDT object.")
