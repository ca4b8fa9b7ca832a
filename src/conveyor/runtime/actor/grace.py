"""The time that an actor has to end by itself."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback

from conveyor.checks import in_seconds
from conveyor.runtime import threads


def limit(name: str, seconds: float) -> None:
    """Kill this process, which has begun to end of its own accord, if that takes longer than ``seconds``.

    If the driver has asked for the end, it sees to that itself.
    """
    if seconds > 0:
        threads.start(_kill, "grace", name, seconds, threading.main_thread().ident)


def _kill(name: str, seconds: float, main_thread: int) -> None:
    time.sleep(seconds)
    frame = sys._current_frames().get(main_thread)
    where = "" if frame is None else f"; it is in\n{traceback.format_stack(frame)[-1]}"
    message = f"{name} has not ended within the grace period of {in_seconds(seconds)} and is killed{where}\n"
    # Past Python's buffers, whose locks a thread that hangs may hold.
    os.write(2, message.encode("utf-8", "backslashreplace"))
    os.kill(os.getpid(), signal.SIGKILL)
