"""Hosts actors as processes that Ray starts, on the driver's machine."""

from __future__ import annotations

import itertools
import logging
import os
import re
import select
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from msgspec import Struct, field

from conveyor.engine.events import EventLoop, guarded
from conveyor.engine.headless import SETTLED, goes_on
from conveyor.engine.ray.courier import Courier
from conveyor.engine.ray.ends import exit_status, wait_until_reaped
from conveyor.engine.ray.greeting import Birth, Told, write_file
from conveyor.engine.ray.placement import ray_options, wanted
from conveyor.engine.ray.shell import Shell
from conveyor.engine.surroundings import surroundings
from conveyor.exceptions import ActorStartError, SystemLimitError
from conveyor.runtime import threads
from conveyor.runtime.driver.hosts import UNKNOWN_END, Spawned
from conveyor.runtime.protocol import ProcessOptions
from conveyor.runtime.uninterrupted import uninterrupted

_log = logging.getLogger("conveyor")

#: Seconds after which the log says what an actor's start waits for.
_SAID_AFTER = 10.0
#: Ray may go on placing actors on a node that has died, until it has noticed.
_ATTEMPTS = 3
#: Seconds that the end of a killed process may take, and Ray's word about how a process has ended.
_CLOSE_TIMEOUT = 10.0
_WORD_TIMEOUT = 1.0
_TAIL_BYTES = 8 << 10
_TAIL_LINES = 20
#: How lines begin that Ray itself writes to the file, for whoever reads it.
_RAYS_LINES = (":job_id:", ":actor_name:", ":task_name:")
#: How Ray says with which code a process has ended.
_EXIT_CODE = re.compile(r"exit code (\d+)")


class _Actor(Struct, eq=False):
    """One process, from the wish for it to its end. All but ``done`` changes on the hosts' thread."""

    number: int
    name: str
    wants: str
    on_spawned: Callable[[int], object]
    #: Of what it gets: the birth's file, and the driver's descriptors. Closed once they are sent.
    fds: list[int] = field(default_factory=list)
    #: Ray's handle and the ref of the call that lasts as long as the process.
    handle: Any = None
    ran: Any = None
    pid: int = 0
    pidfd: int = -1
    stderr: str = ""
    error: str = ""
    #: Ray says that it has died, and it had not come to the driver.
    died_early: bool = False
    unwanted: bool = False
    killed: bool = False
    went_on: bool = False
    #: What it ends with, by what it has said itself, by the kernel, and by Ray.
    code: int | None = None
    status: int | None = None
    word: str | None = None
    over: bool = False
    #: Set once there is a pid or an error.
    done: threading.Event = field(default_factory=threading.Event)

    def close_fds(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()

    def refuse(self, why: str) -> None:
        """There will be no such process."""
        if not self.done.is_set():
            self.error = why
            self.done.set()


class RayHosts:
    """Starts and ends processes for the driver, by Ray."""

    places = True

    def __init__(
        self, ray: Any, environ: Mapping[str, str], disconnect: Callable[[], object]
    ) -> None:
        """``ray``: the module, connected. ``environ``: variables of all actors. ``disconnect`` is called when
        all of them are gone."""
        self._ray = ray
        self._environ = environ
        self._disconnect = disconnect
        self._events = EventLoop()
        self._courier = Courier(self._events, self._on_farewell)
        self._numbers = itertools.count(1)
        self._classes: dict[str, Any] = {}
        self._living: dict[int, _Actor] = {}
        self._all_gone = threading.Condition()
        #: Held to use a pidfd off the hosts' thread, and to close it: its number may be another's afterwards.
        self._pidfds = threading.Lock()
        self._connection = ray.get_runtime_context().get_worker_id()
        self._on_exit: Callable[[int, int], None] = lambda pid, status: None

    def start(self, on_exit: Callable[[int, int], None]) -> None:
        self._on_exit = on_exit
        self._courier.start()

    def on_thread(self) -> bool:
        return self._events.on_thread()

    def spawn(
        self,
        name: str,
        payload: bytes,
        fds: Sequence[int],
        options: ProcessOptions,
        on_spawned: Callable[[int], object],
    ) -> Spawned:
        self._check_connected(name)
        asked = ray_options(options)
        told = Told(name, surroundings(), payload)
        environ = {**self._environ, **options.env_vars}
        for attempt in range(_ATTEMPTS):
            actor = _Actor(next(self._numbers), name, wanted(asked), on_spawned)
            last = attempt == _ATTEMPTS - 1
            if self._start(actor, asked, told, fds, environ, last):
                break
        return Spawned(
            actor.pid,
            partial(_tail, actor),
            lambda: None,
            lambda: self.end_headless(actor.pid),
            lambda: actor.went_on,
        )

    def _check_connected(self, name: str) -> None:
        """Ray would start another cluster by itself, to place there an actor that nothing else knows."""
        ray = self._ray
        if ray.is_initialized() and ray.get_runtime_context().get_worker_id() == self._connection:
            return
        raise ActorStartError(
            f"cannot start actor {name!r}: the connection to Ray that the session was started on has ended "
            f"(by ray.shutdown()?). Call conveyor.shutdown(), and conveyor.init() again"
        )

    def _start(
        self,
        actor: _Actor,
        asked: Mapping[str, Any],
        told: Told,
        fds: Sequence[int],
        environ: dict[str, str],
        last: bool,
    ) -> bool:
        """Whether there is such a process. Raises why there is none, unless it is worth while to try again:
        nothing of the user's has run in one that has died with its node before it came here."""
        try:
            uninterrupted(partial(self._ask, actor, asked, told, fds, environ))
            self._wait_for(actor)
            if actor.error and (last or not actor.died_early):
                raise ActorStartError(f"cannot start actor {actor.name!r}: {actor.error}")
        except BaseException:
            self._events.call(partial(self._give_up, actor))
            raise
        return not actor.error

    def _ask(
        self,
        actor: _Actor,
        asked: Mapping[str, Any],
        told: Told,
        fds: Sequence[int],
        environ: dict[str, str],
    ) -> None:
        # Duplicates: whoever waits may be interrupted and close his own while they are sent.
        actor.fds.append(write_file(told))
        actor.fds.append(os.pidfd_open(os.getpid()))
        actor.fds.extend([os.dup(fd) for fd in fds])
        key = self._courier.expect(
            actor.number, partial(self._arrived, actor), partial(self._refused, actor)
        )
        birth = Birth(self._courier.address, actor.number, key, environ)
        actor.handle = self._class(actor.name).options(**asked).remote()
        actor.ran = actor.handle.run.remote(birth)

        def tell(future: Any) -> None:
            error = None if future.cancelled() else future.exception()
            self._events.call(partial(self._has_run, actor, error))

        actor.ran.future().add_done_callback(tell)

    def _class(self, name: str) -> Any:
        """Ray's class for actors of that name: it is what Ray's tools and logs call them."""
        name = re.sub(r"\W", "_", name.partition("#")[0]) or "Actor"
        made = self._classes.get(name)
        if made is None:
            cls = type(name, (Shell,), {"__module__": Shell.__module__, "__doc__": Shell.__doc__})
            made = self._classes[name] = self._ray.remote(num_cpus=0)(cls)
        return made

    def _wait_for(self, actor: _Actor) -> None:
        if not actor.done.wait(_SAID_AFTER):
            # Elsewhere: Ray answers natively, and where it does not answer this thread could neither be
            # interrupted nor hear that the actor is there.
            with suppress(SystemLimitError):  # a line less
                threads.start(self._say_what_it_wants, "what-it-wants", actor)
            actor.done.wait()

    def _say_what_it_wants(self, actor: _Actor) -> None:
        _log.warning(
            "actor %s is not started yet: Ray has to place it, and it wants %s; available are %s",
            actor.name,
            actor.wants,
            self._ray.available_resources(),
        )

    # On the hosts' thread.

    def _arrived(self, actor: _Actor, pid: int, stderr: str) -> Sequence[int]:
        if actor.unwanted:
            raise OSError("nobody wants it any more")
        actor.pidfd = os.pidfd_open(pid)  # it waits for our answer, so the number is still its own
        actor.pid, actor.stderr = pid, stderr
        self._living[pid] = actor
        self._events.add(actor.pidfd, partial(self._ended, actor))
        self._events.call(partial(self._sent, actor))
        return actor.fds

    def _sent(self, actor: _Actor) -> None:
        actor.close_fds()
        if actor.error:
            return
        guarded(partial(actor.on_spawned, actor.pid))
        actor.done.set()

    def _refused(self, actor: _Actor, why: str) -> None:
        actor.close_fds()
        actor.refuse(why)

    def _give_up(self, actor: _Actor) -> None:
        """Whoever asked for it does not want it any more."""
        actor.unwanted = True
        self._courier.forget(actor.number)
        actor.close_fds()
        if actor.pid:
            self._signal(actor, signal.SIGKILL)
        elif actor.handle is not None:
            self._kill_by_ray(actor)

    def _kill_by_ray(self, actor: _Actor) -> None:
        # Ray may be disconnected by now, and its actors with it.
        with suppress(Exception):
            self._ray.kill(actor.handle)

    def _on_farewell(self, pid: int, code: int) -> None:
        actor = self._living.get(pid)
        if actor is not None:
            actor.code = code

    def _has_run(self, actor: _Actor, error: BaseException | None) -> None:
        """Ray says that the call that is the actor's life is over."""
        actor.word = "" if error is None else str(error)
        if not actor.pid:
            self._courier.forget(actor.number)
            actor.close_fds()
            actor.died_early = isinstance(error, self._ray.exceptions.ActorDiedError)
            actor.refuse(_said(error))

    def _ended(self, actor: _Actor) -> None:
        """The process is gone."""
        self._events.remove(actor.pidfd)
        self._courier.last_words(actor.pid)
        actor.over = True
        actor.status = exit_status(actor.pidfd)
        if actor.killed or actor.code is not None or actor.status is not None:
            self._report(actor)
        else:  # how it ended its parent knows, which has not looked yet
            threads.start_or_run(self._see_end, "how-it-ended", actor)

    def _see_end(self, actor: _Actor) -> None:
        pidfd = os.dup(actor.pidfd)
        try:
            wait_until_reaped(pidfd, _WORD_TIMEOUT)
            actor.status = exit_status(pidfd)
        finally:
            os.close(pidfd)
        self._events.call(partial(self._report, actor))

    def _report(self, actor: _Actor) -> None:
        if self._living.pop(actor.pid, None) is None:
            return
        with self._pidfds:
            os.close(actor.pidfd)
            actor.pidfd = -1
        actor.handle = actor.ran = None
        guarded(partial(self._on_exit, actor.pid, self._status_of(actor)))
        with self._all_gone:
            self._all_gone.notify_all()

    def _status_of(self, actor: _Actor) -> int:
        """Its wait status, as far as it can be known of a process that is Ray's child."""
        if actor.code is not None:
            return actor.code << 8
        if actor.status is not None:
            return actor.status
        if actor.killed:
            return int(signal.SIGKILL)
        told = _EXIT_CODE.search(actor.word or "")
        return UNKNOWN_END if told is None else (int(told.group(1)) & 0xFF) << 8

    # On any thread.

    def _signal(self, actor: _Actor, number: int) -> None:
        actor.killed = actor.killed or number == signal.SIGKILL
        with self._pidfds, suppress(OSError):  # it has just ended
            signal.pidfd_send_signal(actor.pidfd, number)

    def kill(self, pid: int) -> None:
        actor = self._living.get(pid)
        if actor is not None:
            self._signal(actor, signal.SIGKILL)

    def end_headless(self, pid: int) -> None:
        actor = self._living.get(pid)
        if actor is not None and not actor.over:
            threads.start_or_run(self._end_headless, "headless", actor)

    def _end_headless(self, actor: _Actor) -> None:
        goes = goes_on(actor.pid)
        if goes is None:
            with self._pidfds:
                pidfd = -1 if actor.pidfd < 0 else os.dup(actor.pidfd)
            if pidfd < 0:
                return
            try:
                poll = select.poll()
                poll.register(pidfd, select.POLLIN)
                poll.poll(SETTLED * 1000)
            finally:
                os.close(pidfd)
            goes = goes_on(actor.pid) is not False
        if goes and not actor.over:
            actor.went_on = True
            self._signal(actor, signal.SIGKILL)

    def watch(self, fd: int, callback: Callable[[], object]) -> None:
        self._events.add(fd, callback)

    def unwatch(self, fd: int) -> None:
        self._events.remove(fd)

    def close(self) -> None:
        for actor in list(self._living.values()):
            self._signal(actor, signal.SIGKILL)
        with self._all_gone:
            self._all_gone.wait_for(lambda: not self._living, _CLOSE_TIMEOUT)
        self._events.call(self._courier.close)
        self._events.close()
        self._disconnect()


def _said(error: BaseException | None) -> str:
    """Why there is no process, by what Ray says of the call that was to be its life."""
    if error is None:
        return "it has ended before it came to the driver"
    cause = getattr(error, "cause", None)
    return str(cause if isinstance(cause, ActorStartError) else error)


def _tail(actor: _Actor) -> str:
    """The last lines that it has written to stderr, which Ray keeps in a file."""
    if not actor.stderr:
        return ""
    try:
        with open(actor.stderr, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    return "\n".join([line for line in lines if not line.startswith(_RAYS_LINES)][-_TAIL_LINES:])
