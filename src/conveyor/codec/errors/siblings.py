"""Several errors of one execution: the first is raised, and tells of the others."""

from __future__ import annotations

from conveyor.codec.errors.encoding import append_to_message, read_error
from conveyor.exceptions import TaskError

#: Characters of what an error says.
_MOST_TEXT = 500


def first_line(text: str) -> str:
    """The first line of what an error says; where that is not all, it says so."""
    first, _, more = text.partition("\n")
    return f"{first[:_MOST_TEXT]} [...]" if more or len(first) > _MOST_TEXT else first


def summarize_error(meta: bytes) -> str:
    """What has failed, on one line, of an error that ``encode_error`` has encoded."""
    frame = read_error(meta)
    first = first_line(frame.message)
    text = f"{frame.type_name}: {first}" if first else frame.type_name
    where = [
        f"{kind} {name!r}" for kind, name in (("actor", frame.actor), ("node", frame.node)) if name
    ]
    return f"{text} (raised in {' and '.join(where)})" if where else text


def add_sibling(error: BaseException, meta: bytes) -> None:
    """Let ``error`` tell that the one in ``meta`` was raised in the same execution."""
    summary = summarize_error(meta)
    if isinstance(error, TaskError):
        append_to_message(error, f"also failed in this execution: {summary}")
    remote = read_error(meta).remote_traceback.rstrip("\n")
    note = f"Also failed in this execution: {summary}"
    # Not add_note(): that is new in Python 3.11, and a user's class may have one of its own.
    notes = error.__dict__.setdefault("__notes__", [])
    if isinstance(notes, list):
        notes.append(f"{note}; the traceback there:\n\n{remote}" if remote else note)
