"""Detections about cycles of waits over hosts, on a model of hosts whose messages take any time.

Processes wait for calls, whose callee they know, and for executions that go from process to process: who of
them holds one up is asked of its owner, who asks all hosts, and may be somebody else when the answer comes.
"""

import random
from collections import Counter, defaultdict, deque

from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor.runtime.deadlock_detector import Look, Pause, Waiting, WaitsThere, detect
from conveyor.runtime.wait_graph import CALLS, ONE, STEPS, call_of, steps_of


class Execution:
    """Of a graph of ``owner``'s: these processes have a step of it, one after the other."""

    def __init__(self, owner, path):
        self.owner, self.path = owner, path
        self.done = 0  # steps
        self.arrived = set()  # those whose input has come

    @property
    def place(self):
        """Changes whenever somebody else has to do something."""
        return self, self.done, len(self.arrived)

    @property
    def at(self):
        """Where it is, or is about to come; ``None``: it is done."""
        return self.path[self.done] if self.done < len(self.path) else None


class Process:
    """An actor that does one thing at a time. It waits for one call or execution, or runs, or is idle."""

    def __init__(self, slot, host):
        self.slot, self.host = slot, host
        self.incarnation = 1
        self.doing = (
            None  # the call that it serves, (caller, number); "own" for what nobody waits for
        )
        self.waits = None  # (whose call it waits for, number); or an execution
        self.pending = (
            None  # what the execution's owner was asked, and since which question that is
        )
        self.questions = 0
        self.requested_at = None  # the execution's place when it was asked about last
        self.stamp = 0
        self.numbers = 0
        self.requested = self.answered = 0
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
        self.lines = defaultdict(deque)  # from process to process, of which the pumps know nothing
        self.answers_due = []  # of owners who are asking the hosts: generators
        self.rests = False  # nothing is done that need not be
        self.detection = None
        self.held = set()  # rings and processes of which nothing happens for long
        #: Those that were in a cycle at some time since the detection began.
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
        if isinstance(what, Execution):
            if what.at is None:
                for one in self.processes:
                    if one.waits is what:
                        self.lines[what.owner, one.slot].append(("outcome", what))
                return
            what.arrived.add(what.done)
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

    def execute(self, one):
        path = [self.rng.choice(self.processes).slot for _ in range(self.rng.randint(1, 3))]
        one.waits = Execution(self.rng.choice(self.processes).slot, path)
        one.stamp += 1
        self.pass_on(one.waits, self.processes[one.waits.owner])

    def pass_on(self, execution, source):
        to = execution.owner if execution.at is None else execution.at
        self.publish(source, self.processes[to], 2 if execution.at is None else 0, execution)

    def finish(self, one):
        doing, one.doing = one.doing, None
        if doing != "own" and isinstance(doing[1], Execution):
            doing[1].done += 1
            self.pass_on(doing[1], one)
        elif doing != "own":
            caller, number = doing
            self.publish(one, self.processes[caller], 1, (one.slot, number))

    def look(self, one):
        """What a wait does when its doorbell has rung: what is asked is read before it looks."""
        requested = one.requested
        if one.waits in one.replies:
            self.go_on(one)
            return
        if isinstance(one.waits, Execution):
            # It asks when it is asked, and else from time to time.
            has_moved = one.requested_at != one.waits.place
            often = not self.rests and self.rng.random() < 0.3
            if one.pending is None and (requested != one.answered or has_moved or often):
                one.questions += 1
                one.pending, one.requested_at = (one.questions, requested), one.waits.place
                question = "question", one.slot, one.questions, one.waits
                self.lines[one.slot, one.waits.owner].append(question)
            return
        to, number = one.waits
        self.note(one, to, call_of(one.slot, one.incarnation, number), requested)

    def note(self, one, to, work, requested):
        one.answered = requested
        one.rows = tuple(
            (lane, one.stamp, one.answered, ONE, to, work, f"{one.slot} waits for {to}")
            for lane in (STEPS, CALLS)
        )

    def go_on(self, one):
        one.waits, one.rows, one.pending = None, (), None

    # Who holds up an execution

    def say(self, line):
        what, *more = self.lines[line].popleft()
        to = self.processes[line[1]]
        if what == "outcome":
            to.replies.add(more[0])
        elif what == "question":
            self.answers_due.append(self.answer(*more))
        elif to.pending is not None and to.pending[0] == more[0]:
            _, holder = more
            requested, to.pending = to.pending[1], None
            if holder is None:
                to.rows, to.answered = (), requested
                return
            if not to.rows or to.rows[0][4] != holder:
                to.stamp += 1
            self.note(to, holder, steps_of(1), requested)

    def answer(self, slot, number, execution):
        """The owner's: each host says when it likes what it knows of its own processes."""
        seen = {}
        for host in self.rng.sample(self.hosts, len(self.hosts)):
            yield
            seen[host] = execution.done, set(execution.arrived)
        holder = None
        for step in reversed(range(len(execution.path))):
            done, arrived = seen[self.processes[execution.path[step]].host]
            if done > step:
                break  # it is on its way
            if step in arrived:
                holder = execution.path[step]
                break
        self.lines[execution.owner, slot].append(("answer", number, holder))

    def answer_on(self, answer):
        if next(answer, "over") == "over":
            self.answers_due.remove(answer)

    # What is true

    def in_cycle(self, one):
        """Whether it waits for itself, whatever comes of messages that are on their way."""
        at, seen = one, set()
        while at.waits is not None and at not in seen:
            seen.add(at)
            if isinstance(at.waits, Execution):
                if at.waits.at is None:
                    return False
                at = self.processes[at.waits.at]
                continue
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
        self.detection = detect(
            one.reader, waits, lambda slot: self.processes[slot].host, lambda _: ()
        )
        self.about = one.reader, one.stamp
        self.seen_in_cycle.clear()
        self.next_step(None)

    def next_step(self, answers):
        try:
            step = self.detection.send(answers)
        except StopIteration as over:
            self.detection = None
            if over.value is not None:
                self.verdict(over.value)
            return
        self.looks, self.answers = {}, {}
        if isinstance(step, Look):
            self.looks = {
                host: self.request_server(host, look) for host, look in step.requested.items()
            }
        else:
            assert isinstance(step, Pause)

    def verdict(self, verdict):
        assert self.about in self.seen_in_cycle, "a false alarm"
        self.alarms += 1
        (slot, _), stamp = self.about
        one = self.processes[slot]
        if one.waits is not None and one.stamp == stamp:
            self.go_on(one)  # with the error
            assert verdict.path[0][0] == slot

    def request_server(self, host, look):
        """A host's answer: it is not made at one moment."""
        has = True
        for other, frames in look.has.items():
            for segment, ring, count in frames:
                yield
                source, to = divmod(segment, 100)
                assert self.processes[source].host == other
                has = has and self.arrived[source, to, ring] >= count
        requested = {}
        for slot, _ in look.ask:
            yield
            self.processes[slot].requested += 1
            requested[slot] = self.processes[slot].requested
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
        return WaitsThere(has, requested, notes, {h: tuple(f) for h, f in due.items()})

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
            things = [*self.processes, *self.wires, *self.lines.keys()]
            self.held = {self.rng.choice(things)}
        for one in self.processes:
            if one in self.held:
                continue
            if one.waits is not None:
                found.append((self.look, one))
                if work:
                    if self.rng.random() < 0.05:
                        found.append((self.go_on, one))  # its time is over
                    if self.detection is None and one.rows:
                        found.append((self.ask, one))
            elif one.doing is None:
                if one.mailbox or (work and self.rng.random() < 0.3):
                    found.append((self.begin, one))
            else:
                found.append((self.finish, one))
                if work:
                    found += [(self.call, one), (self.execute, one)]
        found += [
            (self.deliver, ring)
            for ring, wire in self.wires.items()
            if wire and ring not in self.held
        ]
        found += [
            (self.say, line) for line, said in self.lines.items() if said and line not in self.held
        ]
        found += [(self.answer_on, answer) for answer in self.answers_due]
        if self.detection is not None:
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
        self.rests = True
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
