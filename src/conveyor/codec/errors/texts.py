"""Texts of exceptions, wherever they came from: nothing of the user's can make this fail."""

from __future__ import annotations

import os
import traceback
from typing import Any, ClassVar

import conveyor.exceptions
from conveyor.codec.faults import is_fault, type_name


def message_of(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as failure:
        if not is_fault(failure):
            raise
        return f"<str() of the exception failed: {type(failure).__name__}>"


def notes_of(error: BaseException) -> tuple[str, ...]:
    try:
        return tuple(str(note) for note in getattr(error, "__notes__", ()))
    except BaseException as failure:
        if not is_fault(failure):
            raise
        return ()


_PACKAGE = os.path.dirname(os.path.abspath(conveyor.exceptions.__file__))
# Frames of these are the way to the user's code, the same in every traceback.
_ROOMS = ("calls", "driver", "engines", "graph", "refs", "runtime", "worker")
_OURS = tuple(os.path.join(_PACKAGE, room, "") for room in _ROOMS)
_LONGEST = 100_000
_MOST_TEXTS = 128


def format_traceback(error: BaseException) -> str:
    try:
        # Looking a frame up asks the file system, so ours on the way to the user's code are not.
        users = error.__traceback__
        while users is not None and users.tb_frame.f_code.co_filename.startswith(_OURS):
            users = users.tb_next
        summary = traceback.TracebackException(type(error), error, users or error.__traceback__)
        _trim(summary, set())
        text = "".join(summary.format())
        # A message of many lines stands before the traceback already.
        said = "".join(summary.format_exception_only())
        first, _, rest = said.partition("\n")
        if rest.count("\n") > 1 and text.endswith(said) and not isinstance(error, SyntaxError):
            text = f"{text.removesuffix(said)}{first} [...]\n"
    except BaseException as failure:
        if not is_fault(failure):
            raise
        return f"{type_name(type(error))}: <no traceback: {type(failure).__name__}>\n"
    if len(text) > _LONGEST:
        half = _LONGEST // 2
        text = f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"
    return text


class _Frames(traceback.StackSummary):
    """Frames of which each looks the same again: marking the part of a line that has failed parses the line,
    which is a third of what it costs to send an error."""

    _texts: ClassVar[dict[tuple[Any, ...], str]] = {}

    def format_frame_summary(self, frame_summary: Any, **options: Any) -> str:
        frame = frame_summary
        begin, end = frame.lineno, getattr(frame, "end_lineno", None)
        if (
            options or begin != end or frame.locals
        ):  # of several lines: the text depends on all of them
            return super().format_frame_summary(frame, **options)
        columns = frame.colno, frame.end_colno
        key = (frame.filename, begin, columns, frame.name, frame.line)
        text = self._texts.get(key)
        if text is None:
            text = super().format_frame_summary(frame)
            if len(self._texts) >= _MOST_TEXTS:
                self._texts.clear()
            self._texts[key] = text
        return text


def _trim(summary: traceback.TracebackException, seen: set[int]) -> None:
    if id(summary) in seen:
        return
    seen.add(id(summary))
    users = [frame for frame in summary.stack if not frame.filename.startswith(_OURS)]
    if users:
        summary.stack = _Frames(users)
    for other in (
        summary.__cause__,
        summary.__context__,
        *(getattr(summary, "exceptions", None) or ()),
    ):
        if other is not None:
            _trim(other, seen)
