"""Actors that the program has started on Ray itself take part in a session, as its guests.

The process is there, and runs methods for Ray. A thread of it becomes the actor's loop (``guest.py``). From
then on it is a process of the session like any other, but that nobody here ends it: it leaves, and goes on.
One on another host is its agent's guest, as other actors there are the agent's processes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from conveyor.engine.ray.greeting import Birth, Elsewhere, Locality, Told, made_for
from conveyor.engine.ray.guests import guest as there
from conveyor.engine.ray.guests.visitors import Visitors
from conveyor.engine.ray.ray_hosts import RayHosts
from conveyor.engine.ray.started import Started
from conveyor.engine.ray.starts import ENDED
from conveyor.engine.surroundings import surroundings
from conveyor.exceptions import ActorStartError
from conveyor.runtime.driver.hosts.far_host import Home
from conveyor.runtime.driver.hosts.protocol import Settle, Spawned, Spawning
from conveyor.runtime.protocol import Attached, ProcessOptions
from conveyor.runtime.uninterrupted import uninterrupted

_log = logging.getLogger("conveyor")

#: Ray's group of calls that its own parts use: they wait for no call of the program's.
SYSTEM_CALLS = "_ray_system"


class _Guest(Started, eq=False, kw_only=True):
    """One of them, from the wish for it until it has left."""

    attached: Attached


class RayHostsWithGuests(RayHosts):
    """Ray's hosts, which let actors of the program's own in."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._visitors = Visitors(self._events)

    def start(self, on_exit: Callable[[int, int], None], home: Home) -> None:
        super().start(on_exit, home)
        self._visitors.courier.start()

    def spawn(
        self,
        name: str,
        payload: bytes,
        fds: Sequence[int],
        options: ProcessOptions,
        on_spawned: Callable[[int], object],
        settle: Settle,
    ) -> Spawned | Spawning:
        if options.attached is None:
            return super().spawn(name, payload, fds, options, on_spawned, settle)
        self._check_connected(name)
        guest = _Guest(
            number=next(self._numbers),
            name=name,
            asked={},
            on_spawned=on_spawned,
            attached=options.attached,
        )
        told = Told(name, surroundings(), payload)
        try:
            # Ray may not have placed it, or its process may be busy: the session's end is the wait's, too.
            with self._starts.under_way(guest.number, partial(self._end_attaching, guest)):
                uninterrupted(partial(self._invite, guest, told, fds))
                guest.done.wait()
                if guest.elsewhere is not None and not guest.error:
                    guest.done.clear()
                    uninterrupted(partial(self._invite_abroad, guest, told, settle))
                    guest.done.wait()
            if guest.error:
                raise ActorStartError(f"cannot attach Ray's actor {name!r}: {guest.error}")
        except BaseException:
            self._events.call(partial(self._turn_away, guest))
            raise
        host = guest.host
        return Spawned(
            guest.key,
            str,
            lambda: None,
            lambda: None,
            lambda: False,
            "" if host is None else host.name,
            lambda: None if guest.ended is None else (guest.ended.page, guest.ended.left),
            lambda: "" if host is None or guest.ended is not None else host.lost,
            stays=True,
        )

    def _invite(self, guest: _Guest, told: Told, fds: Sequence[int]) -> None:
        with self._starts.asking(f"attach Ray's actor {guest.name!r}"):
            guest.fds += made_for(told, fds)
            door = self._visitors.courier
            key = door.expect(
                guest.number, partial(self._comes, guest), partial(self._refused, guest)
            )
            waits = Locality.own()
            self._call_in(
                guest, Birth(door.address, guest.number, key, {}, waits, node=self._own_node)
            )

    def _invite_abroad(self, guest: _Guest, told: Told, settle: Settle) -> None:
        """Have the agent of its node let it in."""
        assert guest.elsewhere is not None
        with self._starts.asking(f"attach Ray's actor {guest.name!r}"):
            host = self._agents.at(guest.elsewhere)
            place, payload, segments = settle(host)
            guest.host, guest.place = host, place
            self._abroad[guest.number] = guest
            told = Told(told.name, told.around, payload)
            key = host.expect(guest.number, place[0], told, segments, visits=True)
            self._call_in(guest, Birth(host.door, guest.number, key, {}, host.locality, stay=True))

    def _call_in(self, guest: _Guest, birth: Birth) -> None:
        """Have Ray tell it where it is waited for."""
        attached = guest.attached
        call = attached.handle.__ray_call__.options(concurrency_group=SYSTEM_CALLS)
        joined = call.remote(there.join, birth, attached.in_turn)

        def tell(future: Any) -> None:
            error = None if future.cancelled() else future.exception()
            said = future.result() if error is None and not future.cancelled() else None
            self._events.call(partial(self._has_joined, guest, error, said))

        joined.future().add_done_callback(tell)

    # On the hosts' thread.

    def _comes(self, guest: _Guest, pid: int, _stderr: str) -> Sequence[int]:
        if guest.unwanted:
            raise OSError("nobody wants it any more")
        self._visitors.add(guest, pid)
        guest.on_end = partial(self._report, guest)
        self._living[pid] = guest
        self._events.call(partial(self._sent, guest))
        return guest.fds

    def _refused(self, guest: _Guest, why: str) -> None:
        """It cannot be taken, and may have been noted already: what it is given could not be sent."""
        if guest.pid:
            self._living.pop(guest.pid, None)
            self._visitors.forget(guest)
            guest.pid = 0
        guest.refuse(why)

    def _has_joined(
        self, guest: _Guest, error: BaseException | None, said: bool | Elsewhere | None
    ) -> None:
        """Ray says how the call has ended that was to bring it here: whether its calls take turns, or where
        it is."""
        if said is False and guest.attached.in_turn:
            _log.warning(
                "Ray's own calls of actor %s may run while a method of it does that was called or bound "
                "here: this version of Ray does not let them take turns",
                guest.name,
            )
        if guest.pid and isinstance(error, self._ray.exceptions.RayTaskError):
            # It has come, and then something was not to be had: it says farewell, and not why.
            _log.warning("actor %s of Ray cannot take part: %s", guest.name, _why(error))
        if guest.pid or guest.error or (error is None and guest.host is not None):
            return  # of one elsewhere its agent tells
        self._visitors.courier.forget(guest.number)
        guest.close_fds()
        if isinstance(said, Elsewhere):
            guest.elsewhere = said
            guest.done.set()
        elif guest.host is None:
            guest.refuse(_why(error))
        else:  # what its agent tells of it may be on its way still
            guest.host.disown(guest.number).add_done_callback(
                lambda asked: self._events.call(partial(self._not_come, guest, error, asked))
            )

    def _not_come(self, guest: _Guest, error: BaseException | None, asked: Future[bool]) -> None:
        if asked.exception() is not None or asked.result():
            self._abroad.pop(guest.number, None)
            guest.refuse(_why(error))

    def _end_attaching(self, guest: _Guest) -> None:
        """The session is over."""
        guest.refuse(ENDED)
        self._turn_away(guest)

    def _turn_away(self, guest: _Guest) -> None:
        """Whoever asked for it does not want it any more."""
        guest.unwanted = True
        self._visitors.courier.forget(guest.number)
        guest.close_fds()
        if guest.host is not None and not guest.pid:
            self._abroad.pop(guest.number, None)
            guest.host.disown(guest.number)
            guest.host.kill(*guest.place)  # it may have come before that
        elif guest.pid:
            self._kill(guest)

    # On any thread.

    def _kill(self, actor: Started) -> None:
        if isinstance(actor, _Guest) and actor.host is None:
            self._visitors.tell_to_leave(actor.pid)
        else:
            super()._kill(actor)  # an agent knows its guests

    def end_headless(self, pid: int) -> None:
        if not isinstance(self._living.get(pid), _Guest):
            super().end_headless(pid)

    def close(self) -> None:
        self._events.call(self._see_off)
        super().close()

    def _see_off(self) -> None:
        """The session is over: nobody waits for them."""
        self._visitors.see_off()
        for key, actor in list(self._living.items()):
            if isinstance(actor, _Guest):
                del self._living[key]


def _why(error: BaseException | None) -> str:
    """Why it does not take part, by what Ray says of the call."""
    cause = getattr(error, "cause", None)
    return str(cause if isinstance(cause, ActorStartError) else error)
