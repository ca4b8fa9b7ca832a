"""Work that cannot be done at once, noted for later: by finalizers, or where there is no memory for it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from conveyor import _core
from conveyor.exceptions import ConveyorError

logger = logging.getLogger("conveyor")


class Cleanup:
    """Queue of work that one process has left to do, in the order in which it was noted. Noting takes no
    lock: it may happen in any thread, in the middle of anything."""

    def __init__(self, waker: _core.Waker, wake: Callable[[], object]) -> None:
        """``waker`` and ``wake()`` wake whoever calls :meth:`do`; the first does it in native code."""
        self.waker = waker
        self._wake = wake
        self._left: deque[Callable[[], object]] = deque()

    def finalizer(self, work: Callable[[], object]) -> _core.Finalizer:
        """Return an object after whose end ``work`` is done soon, by another thread or between two calls. It
        has no effect once the session has ended, nor in a forked child.

        No finalizer in Python notes the work, so none can swallow Ctrl-C.
        """
        return _core.Finalizer(self._left.append, work, self.waker)

    def soon(self, work: Callable[[], object]) -> None:
        """Have ``work`` done soon, by another thread or between two calls."""
        self._left.append(work)
        self._wake()

    def again(self, work: Callable[[], object], error: Exception) -> None:
        """Have ``work``, which has failed with ``error``, done with the next cleanup. ``work`` reschedules
        itself if it fails again."""
        logger.warning("something could not be said to an actor, and is said later: %s", str(error))
        self._left.append(work)

    def do(self) -> None:
        """Do all work that is noted by now. Work that this notes in its turn is for the next time."""
        for _ in range(len(self._left)):
            try:
                work = self._left.popleft()
            except IndexError:  # another thread was faster
                return
            with suppress(ConveyorError):  # an actor that is gone needs no goodbye
                work()

    def clear(self) -> None:
        """Forget what is left: the session is over."""
        self._left.clear()
