"""Watching a run: that it goes on, how late this machine is, and when the kernel tells of a death."""

from __future__ import annotations

import faulthandler
import os
import select
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

HUNG = 70  # exit code of a run that hangs


class Watchdog:
    """Ends the process, having said all there is to know, when nothing happens for ``limit`` s."""

    def __init__(self, limit: float, describe: Callable[[], str], pids: Callable[[], list[int]]):
        self._limit = limit
        self._describe = describe
        self._pids = pids
        self._doing: dict[int, tuple[str, float]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def doing(self, what: str) -> None:
        """This thread begins something that must end in time."""
        self._doing[threading.get_ident()] = (what, time.monotonic())

    def idle(self) -> None:
        self._doing.pop(threading.get_ident(), None)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _run(self) -> None:
        # Should this thread not run either (somebody sleeps with the GIL): the C watchdog does.
        while True:
            faulthandler.dump_traceback_later(3 * self._limit, exit=True)
            if self._stop.wait(0.5):
                return
            now = time.monotonic()
            for what, since in list(self._doing.values()):
                if now - since > self._limit:
                    self._report(what, now - since)

    def _report(self, what: str, seconds: float) -> None:
        print(f"\nHANG: {seconds:.1f} s in: {what}", file=sys.stderr)
        for thread, (other, since) in self._doing.items():
            print(
                f"  thread {thread}: {time.monotonic() - since:.1f} s in {other}", file=sys.stderr
            )
        try:
            print(self._describe(), file=sys.stderr)
        except BaseException as error:
            print(f"(no description: {error!r})", file=sys.stderr)
        faulthandler.dump_traceback(all_threads=True)
        spy = shutil.which("py-spy", path=f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}")
        for pid in [os.getpid(), *self._pids()] if spy else ():
            # --nonblocking: a process that is stopped would make it wait.
            command = [spy, "dump", "--nonblocking", "--pid", str(pid)]
            try:
                ran = subprocess.run(command, capture_output=True, text=True, timeout=20)
                print(ran.stdout or ran.stderr, file=sys.stderr)
            except subprocess.TimeoutExpired:
                print(f"py-spy of {pid} hangs", file=sys.stderr)
        sys.stderr.flush()
        os._exit(HUNG)


class Hiccups:
    """How long a thread of this process that wants to run is kept from it."""

    PERIOD = 0.01

    def __init__(self) -> None:
        self._late: list[tuple[int, int]] = []  # when it was woken, how many ns late
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hiccups", daemon=True)
        self._thread.start()

    def worst(self, start: int, end: int) -> int:
        """ns that this thread was late at most between two times of the monotonic clock."""
        late = [ns for when, ns in self._late if when >= start and when - ns <= end]
        return max(late, default=0)

    def forget(self) -> None:
        self._late = []

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        period = int(self.PERIOD * 1e9)
        while True:
            before = time.monotonic_ns()
            if self._stop.wait(self.PERIOD):
                return
            now = time.monotonic_ns()
            self._late.append((now, now - before - period))


def busy_ns() -> int:
    """ns for which this thread has run, or wanted to run and had no core. 0 where it is not told."""
    try:
        with open("/proc/thread-self/schedstat") as schedstat:
            running, waiting, _ = schedstat.read().split()
    except OSError:
        return 0
    return int(running) + int(waiting)


class DeathTimes:
    """When the kernel tells this process, through pidfds, of the end of others."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._pid_of: dict[int, int] = {}
        self._ended: dict[int, int] = {}
        self._closing = os.eventfd(0)
        self._epoll.register(self._closing, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="death times", daemon=True)
        self._thread.start()

    def add(self, pid: int, pidfd: int) -> None:
        """Watch ``pid``; ``pidfd`` must stay open until it has ended."""
        self._pid_of[pidfd] = pid
        self._epoll.register(pidfd, select.EPOLLIN)

    def ended(self, pid: int) -> int | None:
        """Nanoseconds of the monotonic clock, or None while it lives."""
        return self._ended.get(pid)

    def close(self) -> None:
        os.eventfd_write(self._closing, 1)
        self._thread.join()
        self._epoll.close()
        os.close(self._closing)

    def _run(self) -> None:
        while True:
            for descriptor, _ in self._epoll.poll():
                now = time.monotonic_ns()
                if descriptor == self._closing:
                    return
                self._epoll.unregister(descriptor)
                self._ended[self._pid_of.pop(descriptor)] = now


class Hand:
    """Does things to processes from outside at given moments. What belongs together is done in order; of
    the others none waits for another."""

    def __init__(self) -> None:
        self._busy: list[threading.Thread] = []
        self._failures: list[BaseException] = []

    def send(self, errands: Sequence[tuple[float, Callable[[], Any]]]) -> None:
        """Do each of ``errands`` so many seconds from now, and after those before it."""
        began = time.monotonic()
        thread = threading.Thread(
            target=self._run, args=(began, list(errands)), name="hand", daemon=True
        )
        self._busy.append(thread)
        thread.start()

    def wait(self) -> None:
        """Until all errands are done."""
        while self._busy:
            self._busy.pop().join()
        if self._failures:
            raise self._failures[0]

    def _run(self, began: float, errands: list[tuple[float, Callable[[], Any]]]) -> None:
        try:
            for delay, errand in errands:
                time.sleep(max(began + delay - time.monotonic(), 0))
                errand()
        except BaseException as error:
            self._failures.append(error)
