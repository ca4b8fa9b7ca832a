"""Who may still come with a pickled ref, at the rendezvous: against a plain model of it."""

import gc
import itertools
from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from conveyor import _core
from conveyor.codec import set_up_codec
from conveyor.exceptions import ActorDiedError, RuntimeStateError
from conveyor.refs.exports import Exports
from conveyor.refs.ref import Ref
from conveyor.runtime.cleanup import Cleanup

set_up_codec()

DRIVER = (0, 1)
CLEANUP = Cleanup(_core.Waker(), lambda: None)
SOURCE = SimpleNamespace(window=None, describe=lambda ref: "a ref", is_ready=lambda ref: False)


class Peer:
    """An actor's connection."""

    node = None

    def __init__(self, reader):
        self.number = reader[0]
        self.reader = reader
        self.failed = set()
        self.connection = SimpleNamespace(send=lambda message: None)

    def answer(self, export, question, said):
        """It asks nothing."""

    def push(self, export, outcome):
        if not outcome.ok:
            self.failed.add(export)


class Processes:
    """Slots of the process table, each with the process that it has now."""

    def __init__(self, slots):
        self.now = dict.fromkeys(range(1, slots + 1), 1)
        self.dead = set()
        self.exports = Exports(
            "session",
            None,
            lambda: None,
            SimpleNamespace(watch=lambda ref, then: None),
            DRIVER,
            self.gone,
            CLEANUP,
        )

    def gone(self, slot, incarnation):
        if slot == 0:
            return False
        return (slot, incarnation) in self.dead or incarnation != self.now[slot]

    def reader(self, slot):
        return (slot, self.now[slot]) if slot else DRIVER


@pytest.fixture
def processes():
    return Processes(3)


@pytest.fixture
def exports(processes):
    return processes.exports


class Rendezvous(RuleBasedStateMachine):
    """Processes export refs to each other, come with them, or not, and die, and their messages come late."""

    SLOTS = 3
    slots = st.integers(1, SLOTS)

    def __init__(self):
        super().__init__()
        self.processes = Processes(self.SLOTS)
        self.exports = self.processes.exports
        self.originals = []  # the driver's
        self.peers = {}  # the connections that have not ended, by slot
        self.copies = {}  # the driver's
        self.numbers = 0
        self.given = itertools.count(1 << 62)  # by actors
        # The model. Of exports: which processes hold them; of tickets: the export, and who may come.
        self.holders = {}
        self.tickets = {}
        for slot in range(1, self.SLOTS + 1):
            self.connect(slot)

    def connect(self, slot):
        self.peers[slot] = Peer(self.processes.reader(slot))

    def alive(self, slot):
        return self.processes.reader(slot) not in self.processes.dead

    def needed(self):
        exports = {export for export, holders in self.holders.items() if holders}
        return exports | {export for export, readers in self.tickets.values() if readers}

    def use(self, ticket, reader):
        self.tickets[ticket][1].discard(reader)

    def note(self, export, ticket, readers):
        self.holders.setdefault(export, set())
        self.tickets[ticket] = export, {r for r in readers if not self.processes.gone(*r)}

    def addressed(self, slots, former):
        readers = [self.processes.reader(slot) for slot in sorted(slots)]
        return readers + [(1, self.processes.now[1] - 1)] * former

    readers = st.sets(st.integers(0, SLOTS), min_size=1)

    @rule(slots=readers, former=st.booleans())
    def the_driver_exports(self, slots, former):
        readers = self.addressed(slots, former)
        self.originals.append(Ref(SOURCE, -1))
        self.note(*self.exports.export(self.originals[-1], readers), readers)

    @rule(slots=readers, former=st.booleans(), by=slots, number=st.integers(0, 5))
    def an_actor_exports(self, slots, former, by, number):
        """Also one that has died, and whose message comes late. It holds the ref, or has made it."""
        peer, readers = self.peers[by], self.addressed(slots, former)
        held = [export for export, holders in self.holders.items() if peer.reader in holders]
        if number < len(held):
            export = held[number]
        else:
            self.numbers += 1
            export = by, self.numbers
            self.holders[export] = {peer.reader}
        ticket = next(self.given)
        self.exports.peer_exports(peer, export, ticket, readers)
        self.note(export, ticket, readers)

    def some_ticket(self, index):
        return list(self.tickets)[index % len(self.tickets)]

    @precondition(lambda self: self.tickets)
    @rule(index=st.integers(0, 30), slot=slots)
    def an_actor_loads(self, index, slot):
        """If it may: or it has died since, and its message comes late."""
        ticket, peer = self.some_ticket(index), self.peers[slot]
        export, readers = self.tickets[ticket]
        if peer.reader not in readers and self.alive(slot):
            return
        there = export in self.needed() or export[0] == 0
        self.exports.peer_loads(peer, export, ticket, original=False)
        if peer.reader in readers:
            assert there
            assert export not in peer.failed or self.exports._entries[export].outcome is not None
        if there:
            self.holders[export].add(peer.reader)
        self.use(ticket, peer.reader)

    @precondition(lambda self: self.tickets)
    @rule(index=st.integers(0, 30))
    def the_driver_loads(self, index):
        ticket = self.some_ticket(index)
        export, readers = self.tickets[ticket]
        if DRIVER in readers:
            ref = self.exports.load(export, ticket)
            if export[0] != 0:
                self.copies[export] = ref
                self.holders[export].add(DRIVER)
            self.use(ticket, DRIVER)

    @rule()
    def the_driver_drops_its_copies(self):
        for export in self.copies:
            self.holders[export].discard(DRIVER)
        self.copies.clear()
        gc.collect(0)

    @rule(slot=slots, index=st.integers(0, 5))
    def an_actor_drops(self, slot, index):
        peer = self.peers[slot]
        held = [export for export, holders in self.holders.items() if peer.reader in holders]
        if held:
            export = held[index % len(held)]
            self.exports.peer_drops(peer, export)
            self.holders[export].discard(peer.reader)

    @precondition(lambda self: self.tickets)
    @rule(index=st.integers(0, 30), slot=st.integers(0, SLOTS), again=st.booleans())
    def one_gives_up(self, index, slot, again):
        """A reader, once or more often."""
        ticket = self.some_ticket(index)
        export, readers = self.tickets[ticket]
        if self.processes.reader(slot) in readers or again:
            if slot:
                self.exports.peer_gives_up(self.peers[slot], ticket, None)
                self.use(ticket, self.peers[slot].reader)
            else:
                self.exports.give_up([(export, ticket)])
                self.use(ticket, DRIVER)

    @precondition(lambda self: self.tickets)
    @rule(index=st.integers(0, 30), slots=readers, by=st.integers(0, SLOTS))
    def the_writer_finds_that_some_have_left(self, index, slots, by):
        ticket = self.some_ticket(index)
        readers = [self.processes.reader(slot) for slot in slots]
        if by:
            self.exports.peer_gives_up(self.peers[by], ticket, readers)
        else:
            self.exports.give_up([(self.tickets[ticket][0], ticket)], readers)
        for reader in readers:
            self.use(ticket, reader)

    @rule(slot=slots)
    def an_actor_dies(self, slot):
        reader = self.processes.reader(slot)
        if reader not in self.processes.dead:
            self.processes.dead.add(reader)
            self.exports.actor_ended(reader)
            for ticket in self.tickets:
                self.use(ticket, reader)

    @rule(slot=slots, starts_again=st.booleans())
    def its_connection_ends(self, slot, starts_again):
        if self.alive(slot):
            return
        peer = self.peers[slot]
        self.exports.peer_ended(peer, lambda: ActorDiedError("it was killed", "actor"))
        for holders in self.holders.values():
            holders.discard(peer.reader)
        if starts_again:
            self.processes.now[slot] += 1
        self.connect(slot)

    @invariant()
    def what_is_needed_is_kept_and_nothing_else(self):
        CLEANUP.do()
        assert set(self.exports._entries) == self.needed()
        assert set(self.exports._borrows) == {t for t, (_, r) in self.tickets.items() if r}
        assert set(self.exports._borrows._readers) == set(self.exports._borrows)


TestRendezvous = Rendezvous.TestCase
TestRendezvous.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_what_is_gone_says_so(exports):
    export, ticket = exports.export(Ref(SOURCE, -1), [DRIVER])
    exports.give_up([(export, ticket)])
    gc.collect()
    with pytest.raises(RuntimeStateError, match="cannot be loaded any more"):
        exports.load(export, ticket)
