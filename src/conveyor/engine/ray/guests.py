"""Actors that the program has started on Ray itself take part in a session, as its guests.

The process is there, and runs methods for Ray. A thread of it becomes the actor's loop (``guest.py``). From
then on it is a process of the session like any other, but that nobody here ends it: it leaves, and goes on.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from conveyor.engine.events import guarded
from conveyor.engine.ray import guest
from conveyor.engine.ray.courier import Courier
from conveyor.engine.ray.ends import exit_status, status_once_reaped
from conveyor.engine.ray.greeting import Birth, Told, made_for
from conveyor.engine.ray.hosts import RayHosts
from conveyor.engine.ray.processes import WORD_TIMEOUT
from conveyor.engine.ray.started import Awaited
from conveyor.engine.ray.starts import ENDED
from conveyor.engine.surroundings import surroundings
from conveyor.exceptions import ActorStartError
from conveyor.runtime import threads
from conveyor.runtime.driver.far import Home
from conveyor.runtime.driver.hosts import UNKNOWN_END, Settle, Spawned
from conveyor.runtime.protocol import Attached, ProcessOptions
from conveyor.runtime.uninterrupted import uninterrupted

_log = logging.getLogger("conveyor")

#: Ray's group of calls that its own parts use: they wait for no call of the program's.
SYSTEM_CALLS = "_ray_system"


class _Guest(Awaited, eq=False, kw_only=True):
    """One of them, from the wish for it until it has left."""

    attached: Attached


class RayHostsWithGuests(RayHosts):
    """Ray's hosts, which let actors of the program's own in."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        #: Theirs alone: what they say when they go does not say that a process ends.
        self._door = Courier(self._events, self._on_guest_left)
        self._guests: dict[int, _Guest] = {}

    def start(self, on_exit: Callable[[int, int], None], home: Home) -> None:
        super().start(on_exit, home)
        self._door.start()

    def spawn(
        self,
        name: str,
        payload: bytes,
        fds: Sequence[int],
        options: ProcessOptions,
        on_spawned: Callable[[int], object],
        settle: Settle,
    ) -> Spawned:
        if options.attached is None:
            return super().spawn(name, payload, fds, options, on_spawned, settle)
        self._check_connected(name)
        guest = _Guest(
            number=next(self._numbers),
            name=name,
            on_spawned=on_spawned,
            attached=options.attached,
        )
        try:
            told = Told(name, surroundings(), payload)
            # Ray may not have placed it, or its process may be busy: the session's end is the wait's, too.
            with self._starts.under_way(guest.number, partial(self._end_attaching, guest)):
                uninterrupted(partial(self._invite, guest, told, fds))
                guest.done.wait()
            if guest.error:
                raise ActorStartError(f"cannot attach Ray's actor {name!r}: {guest.error}")
        except BaseException:
            self._events.call(partial(self._turn_away, guest))
            raise
        return Spawned(guest.pid, str, lambda: None, lambda: None, lambda: False, stays=True)

    def _invite(self, guest_: _Guest, told: Told, fds: Sequence[int]) -> None:
        attached = guest_.attached
        with self._starts.asking(f"attach Ray's actor {guest_.name!r}"):
            guest_.fds += made_for(told, fds)
            key = self._door.expect(guest_.number, partial(self._comes, guest_), guest_.refuse)
            birth = Birth(self._door.address, guest_.number, key, {}, node=self._own_node)
            call = attached.handle.__ray_call__.options(concurrency_group=SYSTEM_CALLS)
            joined = call.remote(guest.join, birth, attached.in_turn)

        def tell(future: Any) -> None:
            error = None if future.cancelled() else future.exception()
            in_turn = error is None and future.result()
            self._events.call(partial(self._has_joined, guest_, error, in_turn))

        joined.future().add_done_callback(tell)

    # On the hosts' thread.

    def _comes(self, guest: _Guest, pid: int, _stderr: str) -> Sequence[int]:
        if guest.unwanted:
            raise OSError("nobody wants it any more")
        if pid in self._guests:  # it has left, and its farewell has not been heard yet
            self._door.last_words(pid)
        guest.pidfd = os.pidfd_open(pid)  # it waits for our answer, so the number is still its own
        guest.pid = pid
        self._guests[pid] = guest
        self._events.add(guest.pidfd, partial(self._guest_died, guest))
        self._events.call(partial(self._is_in, guest))
        return guest.fds

    def _is_in(self, guest: _Guest) -> None:
        guest.close_fds()
        if not guest.error:
            guarded(partial(guest.on_spawned, guest.pid))
            guest.done.set()

    def _has_joined(self, guest: _Guest, error: BaseException | None, in_turn: bool) -> None:
        """Ray says how the call has ended that was to bring it here."""
        if not guest.pid:
            self._door.forget(guest.number)
            cause = getattr(error, "cause", None)
            guest.refuse(str(cause if isinstance(cause, ActorStartError) else error))
        elif error is None and guest.attached.in_turn and not in_turn:
            _log.warning(
                "Ray's own calls of actor %s may run while a method of it does that was called or bound "
                "here: this version of Ray does not let them take turns",
                guest.name,
            )

    def _end_attaching(self, guest: _Guest) -> None:
        """The session is over."""
        guest.refuse(ENDED)
        self._turn_away(guest)

    def _turn_away(self, guest: _Guest) -> None:
        """Whoever asked for it does not want it any more."""
        guest.unwanted = True
        self._door.forget(guest.number)
        guest.close_fds()
        if guest.pid:
            self._door.tell_to_leave(guest.pid)

    def _on_guest_left(self, pid: int, code: int) -> None:
        guest = self._guests.get(pid)
        if guest is not None:
            self._guest_gone(guest, code << 8)

    def _guest_died(self, guest: _Guest) -> None:
        """Its process has ended, whose parent is Ray."""
        self._events.remove(guest.pidfd)
        self._door.last_words(guest.pid)
        if guest.pid not in self._guests:  # it has left just before
            return
        status = exit_status(guest.pidfd)
        if status is not None:
            self._guest_gone(guest, status)
        else:  # how it ended its parent knows, which has not looked yet
            pidfd, guest.pidfd = guest.pidfd, -1  # that thread closes it
            threads.start_or_run(self._see_guests_end, "how-it-ended", guest, pidfd)

    def _see_guests_end(self, guest: _Guest, pidfd: int) -> None:
        try:
            status = status_once_reaped(pidfd, WORD_TIMEOUT)
        finally:
            os.close(pidfd)
        ended = UNKNOWN_END if status is None else status
        self._events.call(partial(self._guest_gone, guest, ended))

    def _guest_gone(self, guest: _Guest, status: int) -> None:
        if self._guests.pop(guest.pid, None) is None:
            return
        self._close_pidfd(guest)
        guarded(partial(self._on_exit, guest.pid, status))

    def _close_pidfd(self, guest: _Guest) -> None:
        if guest.pidfd >= 0:
            self._events.remove(guest.pidfd)
            os.close(guest.pidfd)
            guest.pidfd = -1

    # On any thread.

    def kill(self, pid: int) -> None:
        if pid in self._guests:
            self._events.call(partial(self._door.tell_to_leave, pid))
        else:
            super().kill(pid)

    def close(self) -> None:
        self._events.call(self._see_off)
        super().close()

    def _see_off(self) -> None:
        """The session is over: who has not left yet does so when its method has returned."""
        self._door.close()
        while self._guests:
            _, guest = self._guests.popitem()
            self._close_pidfd(guest)
