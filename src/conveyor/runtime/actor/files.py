"""Files that are open when an actor ends."""

from __future__ import annotations

import gc
import io
import sys
from contextlib import suppress

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
