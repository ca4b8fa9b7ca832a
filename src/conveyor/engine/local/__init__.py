"""The local engine: actors as processes of this machine, forked by a warm fork server."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from conveyor.engine.local.events import EventLoop
from conveyor.engine.local.launcher import Launcher
from conveyor.engine.local.logs import LogPrinter
from conveyor.engine.local.memory_kills import MemoryKills
from conveyor.engine.local.resources import GpuPool
from conveyor.engine.local.spec import ChildSpec
from conveyor.runtime import context
from conveyor.runtime.driver.driver import Driver
from conveyor.runtime.driver.engine import Spawned
from conveyor.runtime.process import ArenaSize
from conveyor.runtime.protocol import ProcessOptions

#: Dead actors whose last lines of stderr are kept.
_TAILS_KEPT = 1000


class LocalEngine:
    """Starts and ends processes for the driver."""

    def __init__(self, log_to_driver: bool) -> None:
        self._events = EventLoop()
        self._printer = LogPrinter(show=log_to_driver)
        self._gpus = GpuPool()
        self._memory_kills = MemoryKills()
        self._out_of_memory: dict[int, bool | None] = {}
        self._dead: deque[int] = deque()
        self._gpus_of: dict[int, tuple[tuple[str, ...], float]] = {}
        self._on_exit: Callable[[int, int], None] = lambda pid, status: None
        self._launcher = Launcher(self._events, self._exited, self._output)

    def start(self, on_exit: Callable[[int, int], None]) -> None:
        self._on_exit = on_exit
        self._launcher.start()

    def spawn(
        self, name: str, payload: bytes, fds: Sequence[int], options: ProcessOptions
    ) -> Spawned:
        gpus = self._gpus.acquire(options.num_gpus)
        child = ChildSpec(
            name=name,
            payload=payload,
            cwd=os.getcwd(),
            sys_path=tuple(sys.path),
            argv=tuple(sys.argv),
            environ=dict(os.environ),
            env_vars=dict(options.env_vars),
            num_cpus=options.num_cpus,
            gpu_ids=gpus,
        )

        forked = False

        def spawned(pid: int) -> None:
            nonlocal forked
            forked = True  # from now on the GPUs are given back by its exit
            self._printer.add(pid, name)
            self._gpus_of[pid] = (gpus, options.num_gpus)

        try:
            pid = self._launcher.spawn(child, fds, spawned)
        except BaseException:
            if not forked:
                self._gpus.release(gpus, options.num_gpus)
            raise
        return Spawned(
            pid,
            lambda: self._printer.stderr_tail(pid),
            lambda: self._out_of_memory.get(pid),
        )

    def kill(self, pid: int) -> None:
        self._launcher.kill(pid)

    def watch(self, fd: int, callback: Callable[[], object]) -> None:
        self._events.add(fd, callback)

    def unwatch(self, fd: int) -> None:
        self._events.remove(fd)

    def close(self) -> None:
        self._launcher.close()
        self._events.close()

    def _exited(self, pid: int, status: int) -> None:
        gpus, amount = self._gpus_of.pop(pid, ((), 0.0))
        self._gpus.release(gpus, amount)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            self._out_of_memory[pid] = self._memory_kills.killed(pid)
        self._on_exit(pid, status)
        # Tails are kept for error reports, of the latest dead only.
        self._dead.append(pid)
        if len(self._dead) > _TAILS_KEPT:
            forgotten = self._dead.popleft()
            self._printer.forget(forgotten)
            self._out_of_memory.pop(forgotten, None)

    def _output(self, pid: int, stream: str, data: bytes) -> None:
        self._printer.feed(pid, stream, data)


def start(*, log_to_driver: bool = True, arena_bytes: int | None = None, **unknown: Any) -> Driver:
    """Start a session of local processes.

    log_to_driver: print what actors write, each line with the actor's name and pid.
    arena_bytes: the memory cap of each process's arena.
    """
    if unknown:
        raise TypeError(f"the local engine has no option {next(iter(unknown))!r}")
    size = None if arena_bytes is None else ArenaSize(max(16 * arena_bytes, 1 << 30), arena_bytes)
    driver = Driver(LocalEngine(log_to_driver), size)

    driver.at_shutdown = _AtExit(driver).cancel
    return driver


class _AtExit:
    """Ends the session with the interpreter. Cancelled when the session ends before, so that nothing
    keeps the driver's memory and descriptors."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        atexit.register(self._run)

    def cancel(self) -> None:
        atexit.unregister(self._run)

    def _run(self) -> None:
        self._driver.shutdown()
        if context.running() is self._driver:
            context.install(None)
