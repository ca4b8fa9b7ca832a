"""What becomes of errors of a user's manager that nobody waits for, or that are told in words."""

from __future__ import annotations

import logging
import os
from typing import Any

from conveyor.codec.errors.texts import message_of
from conveyor.direct.managers.manager import TensorTransportManager

_log = logging.getLogger("conveyor")


def in_words(error: BaseException) -> str:
    """An error's class and message, whatever its class does."""
    return f"{type(error).__name__}: {message_of(error)}"


def abort(manager: TensorTransportManager, transport: str, obj_id: str, communicator: Any) -> None:
    """Have this end of a transfer raise soon, if it can: the other one has failed, which is told already."""
    try:
        if manager.can_abort_transport():
            manager.abort_transport(obj_id, communicator)
    except Exception:
        _log.warning(
            "process %d: abort_transport() of the transport %r has failed",
            os.getpid(),
            transport,
            exc_info=True,
        )
