"""Transfer of values from one actor to another, over a channel within this process.

It is a real one, a ring and an arena, so that what arrives is what would arrive in another process:
a copy, on private pages where it would be, and an error where it could not be sent.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

from conveyor import _core
from conveyor.codec import decode_error, encode_error
from conveyor.codec.faults import is_of_value
from conveyor.exceptions import TaskError
from conveyor.graph.edges import make_budget
from conveyor.runtime.process import RESULT_BIT, Process


class Failure:
    """Error of user code: both as it travels, and as it was raised, with its traceback and everything in
    it."""

    __slots__ = ("_meta", "_original", "reported")

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
        self.reported = False

    def error(self) -> BaseException:
        """Return the error to raise at the receiver. Its ``__cause__`` is for the debugger."""
        self.reported = True
        made = decode_error(self._meta)
        made.__cause__ = self._original
        return made


class Raised:
    """Exceptions that the tasks of one execution have raised. They become the causes of the errors that
    travelled over the channels."""

    def __init__(self) -> None:
        # By actor and label, which travel with each.
        self._originals: dict[tuple[str, str], BaseException] = {}

    def note(self, error: BaseException, actor: str, label: str) -> None:
        """Note that the task ``label`` of ``actor`` has raised ``error``."""
        if isinstance(error, TaskError):  # it is passed on as what it was
            actor, label = error.actor or actor, error.node or label
        self._originals.setdefault((actor, label), error)

    def error(self, meta: bytes) -> BaseException:
        """Return the error that came as ``meta``, as :meth:`Failure.error` does."""
        made = decode_error(meta)
        original = self._originals.get((made.actor or "", made.node or ""))
        if original is not None:
            made.__cause__ = original
        return made


def interrupts(error: BaseException | None) -> bool:
    """Whether ``error`` is meant for the program as a whole: Ctrl-C, or the debugger's "quit"."""
    debugger = sys.modules.get("bdb")
    return isinstance(error, KeyboardInterrupt) or (
        debugger is not None and isinstance(error, debugger.BdbQuit)
    )


def is_cancellation(error: BaseException) -> bool:
    """Whether ``error`` is the cancellation of a coroutine."""
    asyncio = sys.modules.get("asyncio")  # slow to import
    return asyncio is not None and isinstance(error, asyncio.CancelledError)


class ArrivalError(Exception):
    """Failure to rebuild a value where it arrived; ``error`` says why."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


class Loopback:
    """Carries values. Each thread has rings of its own, and one for each transfer that is under way there, so
    that nobody waits for anybody."""

    def __init__(self, process: Process, slot_bytes: int, memory_bytes: int | None = None) -> None:
        """``slot_bytes``: what a slot holds in place; larger values lie in the arena, and may take
        ``memory_bytes`` there."""
        self._process = process
        self._budget = make_budget(memory_bytes)
        self._stride = -(-slot_bytes // 64) * 64
        self._rings = threading.local()

    def carry(self, value: Any, *, shared: bool, snapshot: bool = False) -> Any:
        """Send ``value`` and return what arrives. ``shared``: others read the same memory. ``snapshot``: it
        arrives as a reference keeps it.

        Raises ``SerializationError`` or ``ArenaFullError`` where the value cannot be sent, ``ArrivalError``
        where it cannot be rebuilt.
        """
        rings = self._rings
        try:
            idle = rings.idle[shared]
        except AttributeError:
            rings.idle, rings.sent_bytes = ([], []), 0
            idle = rings.idle[shared]
        # What runs in between (a signal handler, a finalizer, code of the value's) takes other ends. Those
        # that an interrupt leaves with a frame in them are not used again.
        writer, reader = ends = idle.pop() if idle else self._make(shared=shared)
        before = writer.bytes
        failed: BaseException | None = None
        writer.send(value, 0)
        try:
            arrived = reader.receive_snapshot() if snapshot else reader.receive()
        except BaseException as error:
            if not is_of_value(error):
                raise
            failed = error
        idle.append(ends)
        rings.sent_bytes += writer.bytes - before
        if failed is not None:
            raise ArrivalError(failed) from None
        return arrived

    @property
    def sent_bytes(self) -> int:
        """Size of all frames that have arrived on this thread, in bytes."""
        return getattr(self._rings, "sent_bytes", 0)

    def close(self) -> None:
        """Free the rings. Nothing is sent from now on; values that have arrived stay as long as somebody has
        them."""
        self._rings = threading.local()

    def _make(self, shared: bool) -> tuple[_core.Writer, _core.Reader]:
        segment = _core.Segment.create(_core.Segment.ring_bytes(1, self._stride, 1))
        segment.make_ring(0, 1, self._stride, 1)
        me = self._process.ring_end(RESULT_BIT)
        carries = "values between actors"
        writer = self._process.writer(segment, 0, [me], carries, budget=self._budget)
        reader = self._process.reader(
            segment, 0, 0, me, self._process.arena_of(*me.process), carries, shared=shared
        )
        segment.close_fd()
        return writer, reader
