"""How a child that user code has forked inside of an actor leaves by ``sys.exit``: with its own code, and
with nothing of the actor's end. One that comes back from the method instead is ended where it comes to
(``Inbox.inherited``)."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from conveyor.runtime.actor.files import flush_files


def exit_code(error: SystemExit) -> int:
    """What a process that leaves with ``error`` ends with. Prints a text, as Python does."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def leave(error: SystemExit) -> NoReturn:
    """From a thread that would only end itself by it."""
    code = exit_code(error)
    flush_files()
    os._exit(code)
