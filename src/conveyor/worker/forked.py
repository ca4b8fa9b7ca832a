"""The exit, by ``sys.exit``, of a child that user code has forked inside of an actor: with its own code, and
with nothing of the actor's end. A child that returns from the method instead is ended where it gets to
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
    """Flush all files that can be found.

    Files in globals would be flushed by the interpreter's end, which destroys modules. Files in reference
    cycles would be closed by a collection, but in any order: a text file whose buffer went first loses its
    text.
    """
    files = [thing for thing in gc.get_objects() if issubclass(type(thing), _BUFFERED)]
    files.sort(key=lambda file: not isinstance(file, io.TextIOWrapper))  # they write to the others
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__, *files):
        with suppress(Exception):  # closed, or with nobody at the other end
            stream.flush()


def exit_code(error: SystemExit) -> int:
    """Return the exit code of a process that leaves with ``error``. Prints a text, as Python does."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def leave(error: SystemExit) -> NoReturn:
    """End this process from another thread than the main one, as ``sys.exit`` on the main thread does."""
    code = exit_code(error)
    flush_files()
    os._exit(code)
