"""A descriptor that tells of a thread's end, to be waited for beside sockets."""

from __future__ import annotations

import os
from contextlib import suppress

from conveyor import descriptors


class Ended:
    """Whether a thread has come to its end.

    over: a descriptor that is readable then; -1 once nobody waits for it any more.
    """

    def __init__(self) -> None:
        self.over, end = map(descriptors.own, os.pipe())
        #: Empty when the thread has ended. Who takes it out, in one step, is who closes it: whoever starts
        #: the thread may be interrupted, and then does not know whether there is one.
        self._end = [end]

    @property
    def told(self) -> bool:
        """Whether it has ended."""
        return not self._end

    def tell(self) -> None:
        """The thread ends."""
        end = self._end.pop()
        try:
            with suppress(OSError):  # nobody waits for it
                os.write(end, b".")  # a forked child may have this end, too
        finally:
            os.close(end)

    def close(self) -> None:
        """Nobody waits for it any more."""
        over, self.over = self.over, -1
        if over >= 0:
            os.close(over)

    def __del__(self) -> None:
        # A thread that is there has this, too: there is none.
        self.close()
        while self._end:
            os.close(self._end.pop())
