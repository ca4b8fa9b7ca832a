"""Where calls of one caller come in, and where their results go."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from conveyor import _core
from conveyor.codec import REFERENCES_OF_A_LOCAL
from conveyor.runtime.calls.link_segment import link_limits, reply_offset
from conveyor.runtime.process import RESULT_BIT, Place, Process

if TYPE_CHECKING:
    import asyncio


class Mailbox:
    """The actor's end of one caller's link."""

    def __init__(
        self,
        process: Process,
        segment: _core.Segment,
        caller: tuple[int, int],
        arena: _core.ArenaView,
        bit: int,
    ) -> None:
        """``caller``: its place on the board, and which of the processes there it is; ``arena``: its own."""
        self.bit = bit
        self.caller = caller
        there = Place(*caller, RESULT_BIT)
        name = process.board.name(there.slot)
        self.reader = process.reader(
            segment, 0, 0, there, arena, f"calls from {name}", shared=False
        )
        self.replies = process.writer(segment, reply_offset(segment), [there], "results of calls")
        self.replies.moved_refs = REFERENCES_OF_A_LOCAL
        self.limits = link_limits(segment)
        # Coroutines of calls, and how many cancellations they have been looked through for.
        self.running: dict[int, asyncio.Task[Any]] = {}
        self.cancellations = 0
        # Calls that run side by side may answer side by side.
        self.reply_lock = threading.Lock()

    def reply_error(self, tag: int, meta: bytes) -> None:
        with self.reply_lock:
            self.replies.send_error(meta, tag)
