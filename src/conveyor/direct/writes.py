"""Writes to memory that others may fetch, where a session looks for them: ``init(debug_writes=True)``.

A value's checksum is taken when it is kept, and stands in the process's directory (``native/directory.h``).
Whoever gets all of the value compares it with what he has got.
"""

from __future__ import annotations

from contextlib import suppress

from conveyor import _core
from conveyor.codec.direct import Located
from conveyor.exceptions import SharedWriteError
from conveyor.runtime import context

_RUNNING = 1


def changed(where: Located, board: _core.Board) -> SharedWriteError:
    """Make the error for a process that has fetched a value that was written to."""
    nbytes = sum(_core.lengths_of(where.ranges))
    method = _method_of(where, board)
    return SharedWriteError(in_words(where.number, where.keeper, nbytes, method))


def in_words(number: int, keeper: str, nbytes: int, method: str) -> str:
    """Say that a value was written to, and how to avoid it."""
    by = f" and that its method {method} has returned" if method else ""
    return (
        f"memory of a value of {nbytes:,} bytes (id {number:016x}) that {keeper} keeps{by} was written to "
        "while others could fetch it: call conveyor.experimental.wait_tensor_freed(tensor) before writing, "
        "return a copy, or have a copy stay, with snapshot=True beside tensor_transport="
    )


def keeper_and_method() -> tuple[str, str]:
    """Return this process's name, and the method that it runs; the latter is empty where that is not
    known."""
    runtime = context.running()
    if runtime is None:
        return "this process", ""
    process = runtime.process
    state, graph, _, _, _, _, what = process.board.status(process.slot)
    return process.board.name(process.slot), what if state == _RUNNING and not graph else ""


def _method_of(where: Located, board: _core.Board) -> str:
    with suppress(OSError):
        kept, _, _ = _core.read_directory(where.pid, board.directory(where.slot))
        for number, _, _, names in kept:
            if number == where.number:
                return names.decode(errors="replace").split("\0")[-1]
    return ""
