"""Inquiries about cycles of waits over hosts, on a model of hosts whose messages take any time."""

import random
from collections import Counter, defaultdict, deque

from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor.runtime.waiting.inquiry import Look, Pause, Waiting, WaitsThere, inquire
from conveyor.runtime.waiting.works import CALLS, ONE, STEPS, call_of


class Process:
    """An actor that does one thing at a time. It waits for one call, or runs, or is idle."""

    def __init__(self, slot, host):
        self.slot, self.host = slot, host
        self.incarnation = 1
        self.doing = (
            None  # the call that it serves, (caller, number); "own" for what nobody waits for
        )
        self.waits = None  # (whose call it waits for, number)
        self.stamp = 0
        self.numbers = 0
        self.asked = self.answered = 0
        self.mailbox = deque()
        self.replies = set()
        self.rows = ()

    @property
    def reader(self):
        return self.slot, self.incarnation


class World:
    """What happens is chosen from outside; between hosts messages of one ring come in their order, others in
    any."""

    def __init__(self, hosts, rng):
        self.processes = [Process(slot, host) for slot, host in enumerate(hosts)]
        self.hosts = sorted(set(hosts))
        self.rng = rng
        self.wires = defaultdict(deque)  # by ring: (from, to, 0 for calls or 1 for replies)
        self.published, self.arrived = Counter(), Counter()
        self.inquiry = None
        self.held = set()  # rings and processes of which nothing happens for long
        #: Those that were in a cycle at some time since the inquiry began.
        self.seen_in_cycle = set()
        self.alarms = 0

    # What processes do

    def publish(self, source, to, kind, what):
        ring = (source.slot, to.slot, kind)
        self.published[ring] += 1
        self.wires[ring].append(what)
        if source.host == to.host:
            self.deliver(ring)

    def deliver(self, ring):
        what = self.wires[ring].popleft()
        self.arrived[ring] += 1
        to = self.processes[ring[1]]
        if ring[2]:
            to.replies.add(what)
        else:
            to.mailbox.append((ring[0], what))

    def begin(self, one):
        one.doing = one.mailbox.popleft() if one.mailbox else "own"

    def call(self, one):
        to = self.rng.choice([p for p in self.processes if p is not one])
        one.numbers += 1
        one.waits = to.slot, one.numbers
        one.stamp += 1
        self.publish(one, to, 0, one.numbers)

    def finish(self, one):
        doing, one.doing = one.doing, None
        if doing != "own":
            caller, number = doing
            self.publish(one, self.processes[caller], 1, (one.slot, number))

    def look(self, one):
        """What a wait does when its bell has rung: what is asked is read before it looks."""
        asked = one.asked
        if one.waits in one.replies:
            self.go_on(one)
            return
        to, number = one.waits
        one.answered = asked
        work = call_of(one.slot, one.incarnation, number)
        one.rows = tuple(
            (lane, one.stamp, one.answered, ONE, to, work, f"{one.slot} waits for {to}")
            for lane in (STEPS, CALLS)
        )

    def go_on(self, one):
        one.waits, one.rows = None, ()

    # What is true

    def in_cycle(self, one):
        """Whether it waits for itself, whatever comes of messages that are on their way."""
        at, seen = one, set()
        while at.waits is not None and at not in seen:
            seen.add(at)
            to, number = at.waits
            if self.is_answered(at, to, number):
                return False
            at = self.processes[to]
        return at is one and one.waits is not None

    def is_answered(self, one, to, number):
        on_its_way = self.wires[to, one.slot, 1]
        return (to, number) in one.replies or (to, number) in on_its_way

    def note_truth(self):
        for one in self.processes:
            if self.in_cycle(one):
                self.seen_in_cycle.add((one.reader, one.stamp))

    # Inquiries

    def ask(self, one):
        waits = [Waiting(STEPS, STEPS, one.stamp)]
        self.inquiry = inquire(
            one.reader, waits, lambda slot: self.processes[slot].host, lambda _: ()
        )
        self.about = one.reader, one.stamp
        self.seen_in_cycle.clear()
        self.next_step(None)

    def next_step(self, answers):
        try:
            step = self.inquiry.send(answers)
        except StopIteration as over:
            self.inquiry = None
            if over.value is not None:
                self.verdict(over.value)
            return
        self.looks, self.answers = {}, {}
        if isinstance(step, Look):
            self.looks = {host: self.answering(host, look) for host, look in step.asked.items()}
        else:
            assert isinstance(step, Pause)

    def verdict(self, verdict):
        assert self.about in self.seen_in_cycle, "a false alarm"
        self.alarms += 1
        (slot, _), stamp = self.about
        one = self.processes[slot]
        if one.waits is not None and one.stamp == stamp:
            self.go_on(one)  # with the error
            assert verdict.way[0][0] == slot

    def answering(self, host, look):
        """A host's answer: it is not made at one moment."""
        has = True
        for other, frames in look.has.items():
            for segment, ring, count in frames:
                yield
                source, to = divmod(segment, 100)
                assert self.processes[source].host == other
                has = has and self.arrived[source, to, ring] >= count
        asked = {}
        for slot, _ in look.ask:
            yield
            self.processes[slot].asked += 1
            asked[slot] = self.processes[slot].asked
        here = [one for one in self.processes if one.host == host]
        notes = {}
        for one in here:
            yield
            notes[one.slot] = one.incarnation, one.rows
        due = defaultdict(list)
        for (source, to, ring), count in self.published.items():
            there = self.processes[to].host
            if self.processes[source].host == host != there:
                due[there].append((source * 100 + to, ring, count))
        return WaitsThere(has, asked, notes, {h: tuple(f) for h, f in due.items()})

    def look_on(self, host):
        try:
            next(self.looks[host])
        except StopIteration as over:
            del self.looks[host]
            self.answers[host] = over.value
            if not self.looks:
                self.next_step(self.answers)

    # Time

    def events(self, work):
        """What may happen next. Without ``work`` nobody begins anything, and nobody gives up."""
        found = []
        if not work:
            self.held.clear()
        elif self.rng.random() < 0.02:
            self.held = {self.rng.choice([*self.processes, *self.wires])} if self.wires else set()
        for one in self.processes:
            if one in self.held:
                continue
            if one.waits is not None:
                found.append((self.look, one))
                if work:
                    if self.rng.random() < 0.05:
                        found.append((self.go_on, one))  # its time is over
                    if self.inquiry is None and one.rows:
                        found.append((self.ask, one))
            elif one.doing is None:
                if one.mailbox or (work and self.rng.random() < 0.3):
                    found.append((self.begin, one))
            else:
                found.append((self.finish, one))
                if work:
                    found.append((self.call, one))
        found += [
            (self.deliver, ring)
            for ring, wire in self.wires.items()
            if wire and ring not in self.held
        ]
        if self.inquiry is not None:
            found += [(self.look_on, host) for host in self.looks] * 3
            if not self.looks:
                found.append((self.next_step, None))
        return found

    def happen(self, work=True):
        events = self.events(work)
        if events:
            event, what = self.rng.choice(events)
            event(what)
            self.note_truth()

    def settle(self):
        """Nothing new begins, and all that is on its way comes; then each wait is asked about."""
        self.come_to_rest()
        for _ in range(20):
            alarms = self.alarms
            for one in self.processes:
                if one.rows:
                    self.ask(one)
                    self.come_to_rest()
            if self.alarms == alarms:
                return
        raise AssertionError("there are always more")

    def come_to_rest(self):
        for _ in range(10_000):
            self.happen(work=False)
            if all(event == self.look for event, _ in self.events(False)):
                for one in self.processes:
                    if one.waits is not None:
                        self.look(one)
                if all(event == self.look for event, _ in self.events(False)):
                    return
        raise AssertionError("it does not come to rest")


HOSTS = st.lists(st.integers(0, 2), min_size=2, max_size=5).filter(lambda h: len(set(h)) > 1)


@settings(max_examples=300, deadline=None)
@given(hosts=HOSTS, seed=st.integers(0, 1 << 32), steps=st.integers(50, 400))
def test_no_false_alarm_and_each_cycle_is_found(hosts, seed, steps):
    world = World(hosts, random.Random(seed))
    for _ in range(steps):
        world.happen()
    world.settle()
    assert not any(world.in_cycle(one) for one in world.processes)


def test_the_model_has_cycles_and_waits_that_only_look_like_them():
    alarms = 0
    for seed in range(60):
        rng = random.Random(seed)
        world = World([rng.randrange(3) for _ in range(3)] + [3], rng)
        for _ in range(300):
            world.happen()
        alarms += world.alarms
        world.settle()
    assert alarms > 20
