"""Place of a ref's value."""

from __future__ import annotations

from typing import Any

from conveyor import _core
from conveyor.codec.encoded import DIRECT
from conveyor.later import import_later


class Placed:
    """Mixin of refs that tells where the value is. All of its methods wait until the value is there."""

    __slots__ = ()

    def route(self) -> str:
        """Return how this process gets the value, which is waited for:

        - ``"frame"``: it came with the ref;
        - ``"here"``: it has stayed, in this very process;
        - ``"read"``: it has stayed elsewhere, and is read there;
        - ``"network"``: it has stayed on another node, which sends its memory;
        - ``"ipc"``: it has tensors of a device, whose memory is opened;
        - ``"host"``: such tensors come by way of the host's memory, since this process does not see the
        device;
        - the name of a user's transport;
        - ``"lost"``: it had stayed with a process that is dead.
        """
        found: str = import_later("conveyor.direct.listing").route_of(self)
        return found

    def tensor_transport(self) -> str | None:
        """Return the transport with which the value has stayed where it was made; ``None``: it came with the
        ref. Waits until the value is there."""
        found: str | None = import_later("conveyor.direct.listing").transport_of(self)
        return found

    def value_id(self) -> str | None:
        """Return the ``id`` of the value among :func:`conveyor.objects`; ``None``: it came with the ref.
        Refs that name the same value have the same id. Waits until the value is there."""
        found: str | None = import_later("conveyor.direct.listing").value_id_of(self)
        return found


def may_have_stayed(ref: Any) -> bool:
    """Whether something of the value of a ref that is done may have to be fetched."""
    outcome = ref._settled_now()
    if outcome is _core.EMPTY:
        outcome = ref._settled(None)
    return type(outcome) is _core.Snapshot and (outcome.codec == DIRECT or outcome.keeps)
