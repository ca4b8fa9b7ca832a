"""The broker that has the ends of channels meet, for the driver and for actors."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

from conveyor import _core
from conveyor.driver.actors import DRIVER_SLOT, ActorRecord, Table
from conveyor.driver.network import Network
from conveyor.driver.process_engine import RemoteDescriptors
from conveyor.exceptions import ConveyorError, RuntimeStateError
from conveyor.runtime.blueprint import Blueprint
from conveyor.runtime.broker import (
    RECEIVING,
    SENDING,
    SIDES,
    ChannelPeer,
    ClosedWord,
    Side,
    channel_blueprint,
    closed_error,
    other,
)
from conveyor.runtime.process import close_all, dup_all

Party = ActorRecord | None
"""A process at an end of a channel; ``None`` is the driver."""


class End:
    """An end of a channel, until both have met."""

    __slots__ = ("closed", "fds", "given", "holder", "notified", "used", "view")

    def __init__(self, holder: Party) -> None:
        #: The process that was the last to have it, and whether it has used it.
        self.holder = holder
        self.used = False
        self.closed = False
        #: Whether its process knows of the other end's.
        self.notified = False
        #: Descriptors that introduce the other end's process to this one, once it has come.
        self.fds: list[int] = []
        self.view: _core.ArenaView | None = None
        #: The substitute for the descriptors, if this end's process is on another node.
        self.given: RemoteDescriptors | None = None

    @property
    def introduced(self) -> bool:
        """Whether descriptors, a view or a substitute for them are kept for this end."""
        return bool(self.fds or self.view or self.given)

    def is_over(self, spread: int) -> bool:
        """Whether nobody will ask for what is kept for this end. ``spread``: nor use the channel any more."""
        dead = self.holder is not None and not self.holder.alive
        return (self.notified and not spread) or self.closed or dead


class Channel:
    """A channel whose ends have not both met; or one on several nodes, until both ends are closed."""

    __slots__ = ("depth", "ends", "segment", "spread")

    def __init__(self, depth: int, creator: Party) -> None:
        self.depth = depth
        self.ends = End(creator), End(creator)
        #: As it is on the driver's node, if an end is there.
        self.segment: _core.Segment | None = None
        #: The number of the segment on the nodes of its ends; 0: it is on the driver's alone.
        self.spread = 0

    @property
    def introduced(self) -> bool:
        """Whether both ends have been used, and something is kept for them, or was told."""
        return any(end.notified or end.introduced for end in self.ends)


#: How many channels of dead processes are remembered, with their processes.
_MOST_LOST = 100

_Made = dict[ActorRecord, list[int]]
"""Duplicates of the descriptors that introduce these processes."""

T = TypeVar("T")


class _DiedError(Exception):
    """The process at the other end has died. The user's error is made without the lock: it may wait for the
    exit code, which a thread that needs the lock may bring."""

    def __init__(self, party: ActorRecord) -> None:
        self.party = party


class _UnknownError(Exception):
    """Descriptors of that process are needed. Duplicating them takes the table's lock, which is not taken
    with the broker's own: a handler or a finalizer may close an end while its thread holds the table's."""

    def __init__(self, party: ActorRecord) -> None:
        self.party = party


class _UnspreadError(Exception):
    """The channel has to be made on the nodes of its ends, which is waited for."""


class DriverBroker:
    """The channels of a session whose ends have not both met. See ``runtime.broker.Broker``."""

    def __init__(
        self,
        table: Table,
        network: Network,
        own_view: Callable[[], _core.ArenaView],
    ) -> None:
        """``own_view``: of the driver's arena."""
        self._table = table
        self._network = network
        self._own_view = own_view
        self._numbers = itertools.count(1)
        #: No other lock is taken while this one is held: handlers and finalizers, which take it, may hold
        #: any. Reentrant: they may use a channel in the middle of the work done here.
        self.lock = threading.RLock()
        self._channels: dict[int, Channel] = {}
        #: The last channels that were over because a process with an unused end had died, and who that was.
        self._lost: dict[int, ActorRecord] = {}

    # The driver's own ends

    def open(self, depth: int) -> int:
        return self.open_for(None, depth)

    def hold(self, number: int, side: Side) -> None:
        self.held_by(None, number, side)

    def meet(self, number: int, side: Side, alone: bool) -> ChannelPeer | None:
        self._table.check_open()

        def tell(channel: Channel) -> ChannelPeer:
            own, party = channel.ends[side], channel.ends[other(side)].holder
            assert channel.segment is not None
            assert own.view is not None
            slot, incarnation = self._identity_of(party)
            actor = None if party is None else party.id
            spread = bool(channel.spread)
            peer = ChannelPeer(channel.segment, slot, incarnation, actor, own.view, spread)
            self._mark_notified(number, channel, side)
            return peer

        return self._met(None, number, side, alone, tell)

    def awaits(self, number: int, side: Side) -> bool:
        channel = self._channels.get(number)
        if channel is None:
            return False
        own, there = channel.ends[side], channel.ends[other(side)]
        requested = own.used and own.holder is None
        found = own.introduced or there.used or there.closed
        return requested and not found and (there.holder is None or there.holder.alive)

    def close(self, number: int, side: Side) -> None:
        self.closed_by(None, number, side)

    def death(self, peer: ChannelPeer) -> ConveyorError:
        assert peer.actor is not None  # the driver does not outlive itself
        return self._table.death_of(peer.actor, peer.slot, peer.incarnation)

    # For all

    def open_for(self, creator: Party, depth: int) -> int:
        """Create a channel with both ends at ``creator``; return its number."""
        self._table.check_open()
        with self.lock:
            number = next(self._numbers)
            self._channels[number] = Channel(depth, creator)
            return number

    def held_by(self, party: Party, number: int, side: Side) -> None:
        """Note that an end has come to ``party``."""
        with self.lock:
            channel = self._channels.get(number)
            if channel is not None and not channel.ends[side].used:
                channel.ends[side].holder = party

    def met_by(
        self, party: ActorRecord, number: int, side: Side, alone: bool
    ) -> tuple[Party, list[int] | RemoteDescriptors, bool] | None:
        """Return the holder of the other end, the descriptors of the segment and of the holder's process, and
        whether the channel is on other nodes. The caller closes the descriptors. ``party``: the actor that
        uses an end; ``None`` is returned if the other end is not used yet."""

        def tell(channel: Channel) -> tuple[Party, list[int] | RemoteDescriptors, bool]:
            own = channel.ends[side]
            fds, own.fds = own.fds, []
            found, spread = channel.ends[other(side)].holder, bool(channel.spread)
            self._mark_notified(number, channel, side)
            return found, own.given or fds, spread

        return self._met(party, number, side, alone, tell)

    def closed_by(self, party: Party, number: int, side: Side) -> None:
        """Note that ``party`` has closed an end that has met nobody yet, or one of a channel on several
        nodes."""
        with self.lock:
            channel = self._channels.get(number)
            if channel is None:
                return
            end, there = channel.ends[side], channel.ends[other(side)]
            if end.holder is not party:  # it has come to another process meanwhile
                return
            # Again, if it is closed already: whoever did that may have been broken off.
            end.closed = True
            if not end.notified:
                # The other end may have met this one just now.
                if channel.segment is not None:
                    ClosedWord(channel.segment, side).mark()
                if channel.spread and there.holder is not None:
                    self._network.mark_closed_soon(there.holder, channel.spread, side)
                self._notify(there.holder)
            self._tidy(number, channel)

    def actor_ended(self, record: ActorRecord) -> None:
        """Let go of what only this process, which has ended, would have asked for."""
        with self.lock:
            for number, channel in list(self._channels.items()):
                if any(end.holder is record for end in channel.ends):
                    self._tidy(number, channel)

    def begin_end(self) -> None:
        """Close the ends that the driver has not used yet: the session ends. Processes that wait for them are
        told."""
        with self.lock:
            unused = [
                (number, side)
                for number, channel in self._channels.items()
                for side in (SENDING, RECEIVING)
                if channel.ends[side].holder is None
            ]
        for number, side in unused:
            self.closed_by(None, number, side)

    def end(self) -> None:
        """Forget all channels: the session is over."""
        with self.lock:
            for number in list(self._channels):
                self._forget(number)

    def _met(
        self, party: Party, number: int, side: Side, alone: bool, tell: Callable[[Channel], T]
    ) -> T | None:
        """Return the result of ``tell(channel)``, called with the lock, once ``party`` has met the other end;
        ``None`` until then. If the process at the other end is dead, its death is raised without the lock."""
        made: _Made = {}
        try:
            while True:
                try:
                    with self.lock:
                        channel = self._meet(party, number, side, alone, made)
                        return None if channel is None else tell(channel)
                except _UnknownError as unknown:
                    record = unknown.party
                except _UnspreadError:
                    self._spread(number)
                    continue
                made[record] = self._network.duplicates([record])
                if not made[record]:
                    raise _DiedError(record)
        except _DiedError as died:
            raise died.party.death() from None
        finally:
            close_all(itertools.chain.from_iterable(made.values()))

    def _meet(
        self, party: Party, number: int, side: Side, alone: bool, made: _Made
    ) -> Channel | None:
        """Have an end meet the other one; return the channel, or None if the other end is not used yet.
        Nothing is done twice when this is called again after an error."""
        channel = self._channels.get(number)
        if channel is None:
            if number in self._lost:
                raise _DiedError(self._lost[number])
            raise _taken(number, side)
        own, there = channel.ends[side], channel.ends[other(side)]
        if own.notified or (own.used and own.holder is not party):
            raise _taken(number, side)
        own.holder, own.used = party, True
        if there.closed and not there.notified:
            raise closed_error(number, other(side))
        if alone and not there.used:
            there.holder, there.used = party, True
            self._introduce(channel, made)
        elif not own.introduced:
            if there.holder is not None and not there.holder.alive:
                raise _DiedError(there.holder)
            if not there.used:
                return None
            self._introduce(channel, made)
            self._notify(there.holder)
        return channel

    def _introduce(self, channel: Channel, made: _Made) -> None:
        """Keep for each end what introduces the process at the other one. Both at once, while both processes
        are there: frames of one can be had when it has died."""
        ends = channel.ends
        if not channel.spread and any(_is_remote(end.holder) for end in ends):
            raise _UnspreadError
        if channel.segment is None and not channel.spread:
            channel.segment = self._blueprint(channel).make()
        fds: list[list[int]] = [[], []]
        views: list[_core.ArenaView | None] = [None, None]
        given: list[RemoteDescriptors | None] = [None, None]
        try:
            for i, (end, there) in enumerate((ends, ends[::-1])):
                if _is_remote(end.holder):
                    # Every process knows the driver.
                    known = () if there.holder is None else (there.holder.reader,)
                    given[i] = RemoteDescriptors(channel.spread, known)
                elif end.holder is None:
                    views[i] = self._view(there.holder)
                else:
                    fds[i] = self._descriptors(channel, there.holder, made)
        except BaseException:
            close_all([*fds[0], *fds[1]])
            raise
        for i, end in enumerate(ends):
            end.fds, end.view, end.given = fds[i], views[i], given[i]

    def _blueprint(self, channel: Channel) -> Blueprint:
        sender, receiver = [self._identity_of(end.holder) for end in channel.ends]
        return channel_blueprint(channel.depth, sender, receiver)

    def _spread(self, number: int) -> None:
        """Make the channel on the nodes of its ends. Without the lock: these nodes are waited for."""
        with self.lock:
            channel = self._channels.get(number)
            if channel is None or channel.spread:
                return
            blueprint, holders = self._blueprint(channel), [end.holder for end in channel.ends]
        made = blueprint.make()
        try:
            spread = self._network.spread(blueprint, made)
        except BaseException as error:
            made.close_fd()
            if isinstance(error, ConveyorError):
                _check_alive(holders)  # a death is why a node could not, most often
            raise
        segment: _core.Segment | None = made
        if not spread:  # those of other nodes have been buried
            made.close_fd()
            _check_alive(holders)
            return
        with self.lock:
            if self._channels.get(number) is channel and not channel.spread:
                channel.spread = spread
                if not all(_is_remote(holder) for holder in holders):
                    channel.segment, segment = segment, None
                spread = 0
        if segment is not None:
            segment.close_fd()
        self._network.forget(spread)

    def _view(self, party: Party) -> _core.ArenaView:
        if party is None:
            return self._own_view()
        if party.arena is None:  # it has been buried since
            raise _DiedError(party)
        return party.arena

    def _descriptors(self, channel: Channel, party: Party, made: _Made) -> list[int]:
        assert channel.segment is not None
        if party is None:  # every actor knows the driver
            return dup_all([channel.segment.fd])
        if party not in made:
            raise _UnknownError(party)
        return dup_all([channel.segment.fd, *made[party]])

    def _mark_notified(self, number: int, channel: Channel, side: Side) -> None:
        channel.ends[side].notified = True
        self._tidy(number, channel)

    def _tidy(self, number: int, channel: Channel) -> None:
        """Let go of what nobody will ask for."""
        if all(end.is_over(channel.spread) for end in channel.ends):
            for end in channel.ends:
                if not (end.notified or end.closed) and end.holder is not None:
                    self._lost[number] = end.holder
                    if len(self._lost) > _MOST_LOST:
                        del self._lost[next(iter(self._lost))]
            self._forget(number)
        elif not channel.introduced:
            # They may never meet; who still asks is told why, and needs no memory for that.
            self._let_go(channel)

    def _forget(self, number: int) -> None:
        channel = self._channels.pop(number)
        for end in channel.ends:
            close_all(end.fds)
            end.fds = []
        self._let_go(channel)

    def _let_go(self, channel: Channel) -> None:
        """Free the channel's memory."""
        segment, channel.segment = channel.segment, None
        if segment is not None:
            segment.close_fd()
        spread, channel.spread = channel.spread, 0
        if spread:
            self._network.forget_soon(spread)

    def _identity_of(self, party: Party) -> tuple[int, int]:
        if party is None:
            return DRIVER_SLOT, self._table.process_table.incarnation(DRIVER_SLOT)
        return party.slot, party.incarnation

    def _notify(self, party: Party) -> None:
        self._table.process_table.notify(self._identity_of(party)[0], _core.ATTENTION_BIT)


def _check_alive(parties: Iterable[Party]) -> None:
    for party in parties:
        if party is not None:
            party.check_alive()


def _is_remote(party: Party) -> bool:
    return party is not None and party.node is not None


def _taken(number: int, side: Side) -> RuntimeStateError:
    return RuntimeStateError(
        f"the {SIDES[side]} end of channel {number} belongs to another process, or was closed there: an end "
        "belongs to the process that first uses it. Open another channel for another process"
    )
