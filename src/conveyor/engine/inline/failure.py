"""What user code has raised, as it was raised."""

from __future__ import annotations

import sys

from conveyor.codec import decode_error, encode_error
from conveyor.exceptions import TaskError


class Failure:
    """An error as it travels, and as it was raised: with its traceback and everything in it."""

    __slots__ = ("_meta", "_original", "told")

    def __init__(
        self,
        error: BaseException,
        actor: str,
        label: str,
        constructor: bool = False,
        begun: bool = True,
    ) -> None:
        """``begun``: whether what was called has run."""
        begun = begun and not constructor
        self._meta = encode_error(error, actor, label, constructor=constructor, begun=begun)
        self._original = error
        #: Whether something was answered with it.
        self.told = False

    def error(self) -> BaseException:
        """The error to raise at the receiver. Its ``__cause__`` is for the debugger."""
        self.told = True
        made = decode_error(self._meta)
        made.__cause__ = self._original
        return made


class Raised:
    """What the tasks of one execution have raised: it joins what travels over the channels again."""

    def __init__(self) -> None:
        # By actor and label, which travel with each.
        self._originals: dict[tuple[str, str], BaseException] = {}

    def note(self, error: BaseException, actor: str, label: str) -> None:
        """The task ``label`` of ``actor`` has raised ``error``."""
        if isinstance(error, TaskError):  # it is passed on as what it was
            actor, label = error.actor or actor, error.node or label
        self._originals.setdefault((actor, label), error)

    def error(self, meta: bytes) -> BaseException:
        """The error that came as ``meta``, as :meth:`Failure.error` gives it."""
        made = decode_error(meta)
        original = self._originals.get((made.actor or "", made.node or ""))
        if original is not None:
            made.__cause__ = original
        return made


def interrupts(error: BaseException) -> bool:
    """Whether ``error`` is meant for the program as a whole: Ctrl-C, or the debugger's "quit"."""
    debugger = sys.modules.get("bdb")
    return isinstance(error, KeyboardInterrupt) or (
        debugger is not None and isinstance(error, debugger.BdbQuit)
    )


def is_cancellation(error: BaseException) -> bool:
    """Whether ``error`` is what ends a coroutine."""
    asyncio = sys.modules.get("asyncio")  # slow to import
    return asyncio is not None and isinstance(error, asyncio.CancelledError)
