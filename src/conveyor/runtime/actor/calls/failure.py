"""A call that has come to nothing, as those hear of it who may have missed something in it."""

from __future__ import annotations

from typing import NamedTuple

UNREAD = "call"
"""The name of one whose arguments cannot be read: that lies among them."""


class CallFailure(NamedTuple):
    #: The method's, as users know it.
    name: str
    #: The process that has made the call: its slot of the board, and which of the processes there it is.
    caller: tuple[int, int]
    #: What it has raised, or what has happened in words.
    why: BaseException | str
    #: Whether it had begun.
    ran: bool
    #: The failure's on the board; 0: its caller knew of it when the clock of sights said ``seen_at``;
    #: ``None``: it has none yet.
    number: int | None = None
    seen_at: int = 0
