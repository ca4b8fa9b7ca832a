"""Children that this process forks in the middle of everything: they read what they have inherited,
write over it, live for a while, and end."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence

from chaos_values import digest, scribble

#: s after which a child that hangs is ended by its own alarm.
CHILD_LIMIT = 30


class Children:
    """Those of one process."""

    def __init__(self) -> None:
        self._living: dict[int, str] = {}
        self.total = 0

    def fork(
        self, inherited: Sequence[tuple[object, int]], seconds: float, wait: bool, why: str
    ) -> None:
        """``inherited``: values with their checksums. ``wait``: until the child has written over them."""
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            _live(inherited, seconds, lambda: os.close(writing))  # does not return
        os.close(writing)
        self._living[pid] = why
        self.total += 1
        if wait:
            os.read(reading, 1)  # its end of the pipe closes
        os.close(reading)

    def reap(self) -> list[str]:
        """Wait for all of them; what went wrong in them."""
        wrong = []
        while self._living:
            pid, why = self._living.popitem()
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if code:
                wrong.append(f"a child of {os.getpid()}, forked {why}, ended with {code}")
        return wrong


def _live(
    inherited: Sequence[tuple[object, int]], seconds: float, written: Callable[[], None]
) -> None:
    code = 1
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(CHILD_LIMIT)
        for value, checksum in inherited:
            if digest(value) != checksum:
                raise AssertionError("what the child has inherited is not what the parent had")
        scribble([value for value, _ in inherited])
        after = [digest(value) for value, _ in inherited]
        written()
        time.sleep(seconds)
        if [digest(value) for value, _ in inherited] != after:
            raise AssertionError("somebody has written over what is the child's")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
