"""How a child that user code has forked inside of an actor leaves by ``sys.exit``: with its own code, and
with nothing of the actor's end. One that comes back from the method instead is ended where it comes to
(``Inbox.inherited``)."""

from __future__ import annotations

import gc
import io
import os
import sys
from contextlib import suppress
from typing import NoReturn

_BUFFERED = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


def flush_files() -> None:
    """Flush all that can be found.

    Those in globals would be flushed by the interpreter's end, which destroys modules. Those in circles
    a collection would end, but in any order: a text file whose buffer went first loses its text.
    """
    files = [thing for thing in gc.get_objects() if issubclass(type(thing), _BUFFERED)]
    files.sort(key=lambda file: not isinstance(file, io.TextIOWrapper))  # they write to the others
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__, *files):
        with suppress(Exception):  # closed, or with nobody at the other end
            stream.flush()


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
