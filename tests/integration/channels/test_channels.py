"""Channels between processes that have met: the driver and an actor, two actors, a process and itself."""

import asyncio
import os
import pickle
import signal
import threading
import time

import inside
import pytest
from integration_helpers import WAIT, get

import conveyor
from conveyor.channel import Sender
from conveyor.exceptions import (
    ActorDiedError,
    ChannelClosedError,
    ConveyorError,
    RuntimeStateError,
    SerializationError,
    SessionEndedError,
    WaitTimeoutError,
)


@conveyor.remote
class Party:
    """Has one end of a channel, or both."""

    def __init__(self, end=None):
        self.end = end

    def keep(self, end):
        self.end = end
        return os.getpid()

    def drop(self):
        self.end = None

    def send(self, values, close=True, end=None):
        end = end or self.end
        for value in values:
            end.send(value)
        if close:
            end.close()

    def receive(self, count, end=None):
        return [(end or self.end).receive(timeout=WAIT) for _ in range(count)]

    def all(self, end=None):
        return list(end or self.end)

    def lengths(self, end):
        return [len(value) for value in end]

    def open(self, depth):
        return conveyor.channel.open(depth=depth)

    def own(self, values):
        sender, receiver = conveyor.channel.open(depth=8)
        self.send(values, end=sender)
        return list(receiver)

    def close_and_use(self, sender, receiver, closed):
        (sender if closed == "sender" else receiver).close()
        try:
            sender.send(1, WAIT) if closed == "receiver" else receiver.receive(WAIT)
        except ConveyorError as error:
            return [type(error).__name__]

    def forward(self, end, to):
        return get(to.receive.remote(2, end))

    def pid(self):
        return os.getpid()


@conveyor.remote
class Coroutines:
    async def all(self, end):
        return [value async for value in end]

    async def send(self, end, values):
        for value in values:
            await end.send_async(value)
        end.close()

    async def ping(self):
        return "pong"


def flood(sender):
    for i in range(100):
        sender.send(i, WAIT)


@conveyor.remote
class Starved:
    def receive(self, end):
        from conveyor import _core
        from conveyor.worker import requests as broker

        class Refusing:
            attached = 0

            def attach(self, fd):
                self.attached += 1
                if self.attached == 1:
                    raise OSError(24, "refused")
                return _core.Segment.attach(fd)

        class Core:
            Segment = Refusing()
            ATTENTION_BIT = _core.ATTENTION_BIT

        broker._core = Core
        return end.receive(WAIT)


def test_values_go_from_a_process_to_itself_in_order(engine):
    sender, receiver = conveyor.channel.open(depth=4)
    for i in range(100):
        sender.send({"i": i})
        assert receiver.receive() == {"i": i}


def test_an_actor_has_a_channel_of_its_own(engine):
    assert get(Party.remote().own.remote([1, 2, 3])) == [1, 2, 3]


def test_what_was_sent_is_received_after_the_end_is_closed(engine):
    sender, receiver = conveyor.channel.open()
    with sender:
        sender.send("one")
        sender.send("two")
    assert sender.closed
    assert list(receiver) == ["one", "two"]
    assert list(receiver) == []
    with pytest.raises(ChannelClosedError, match="the sending end of channel 1 is closed"):
        receiver.receive()


def test_an_actor_sends_on_a_channel_whose_reader_has_closed(engine):
    sender, receiver = conveyor.channel.open()
    sender.send(1)
    receiver.close()
    with pytest.raises(ChannelClosedError, match="the receiving end of channel 1 is closed"):
        sender.send(2)
    with pytest.raises(ChannelClosedError, match="the receiving end of channel 1 is closed"):
        receiver.receive()
    with pytest.raises(ChannelClosedError):
        next(receiver)
    sender.close()
    sender.close()
    with pytest.raises(ChannelClosedError, match="the sending end of channel 1 is closed"):
        sender.send(2)


def test_an_array_arrives_as_the_receivers_own(engine):
    numpy = pytest.importorskip("numpy")
    sender, receiver = conveyor.channel.open()
    sent = numpy.arange(1 << 20)
    sender.send(sent)
    got = receiver.receive()
    got += 1
    assert (got == sent + 1).all()


def test_the_driver_sends_and_an_actor_receives(local):
    sender, receiver = conveyor.channel.open(depth=2)
    result = Party.remote().all.remote(receiver)
    for i in range(1000):
        sender.send(i, timeout=WAIT)
    sender.close()
    assert get(result) == list(range(1000))


def test_an_actor_sends_and_the_driver_receives(local):
    sender, receiver = conveyor.channel.open(depth=2)
    done = Party.remote().send.remote(list(range(1000)), True, sender)
    assert list(receiver) == list(range(1000))
    get(done)


@pytest.mark.parametrize("first", [0, 1])
def test_two_actors_meet_over_a_channel(local, first):
    sender, receiver = conveyor.channel.open(depth=2)
    a, b = Party.remote(), Party.remote()
    starts = [
        lambda: a.send.remote([bytes(100_000)] * 50, True, sender),
        lambda: b.lengths.remote(receiver),
    ]
    refs = {i: starts[i]() for i in (first, 1 - first)}
    assert get(refs[1]) == [100_000] * 50
    get(refs[0])


def test_an_actor_opens_a_channel_and_passes_both_ends_on(local):
    sender, receiver = get(Party.remote().open.remote(4))
    result = Party.remote().all.remote(receiver)
    sender.send("from the driver")
    sender.close()
    assert get(result) == ["from the driver"]


def test_an_end_that_was_not_used_is_passed_on(local):
    sender, receiver = conveyor.channel.open()
    a, b = Party.remote(), Party.remote()
    result = a.forward.remote(receiver, b)
    sender.send(1)
    sender.send(2)
    assert get(result) == [1, 2]


def test_an_end_comes_with_a_constructor(local):
    sender, receiver = conveyor.channel.open()
    actor = Party.remote(receiver)
    result = actor.receive.remote(1)
    sender.send("hello")
    assert get(result) == ["hello"]


def test_a_full_channel_lets_the_sender_wait_and_says_for_what(local):
    sender, receiver = conveyor.channel.open(depth=2)
    party = Party.remote()
    get(party.keep.remote(receiver))
    first = party.receive.remote(1)
    sender.send(0)
    assert get(first) == [0]
    sender.send(1)
    sender.send(2)
    with pytest.raises(WaitTimeoutError, match=r"room in channel 1.*2 places.*Party"):
        sender.send(3, timeout=0.05)
    assert sender.statistics().waiting == 2
    more = party.receive.remote(3)
    sender.send(3, timeout=WAIT)
    assert get(more) == [1, 2, 3]


def test_a_wait_for_a_value_says_who_is_to_send_it(local):
    sender, receiver = conveyor.channel.open()
    party = Party.remote()
    get(party.keep.remote(sender))
    done = party.send.remote([1], False)
    assert receiver.receive() == 1
    get(done)
    with pytest.raises(WaitTimeoutError, match=r"a value from channel 1.*Party"):
        receiver.receive(timeout=0.05)


def test_a_wait_for_an_end_that_nobody_uses_says_so(local):
    sender, receiver = conveyor.channel.open()
    party = Party.remote()
    get(party.keep.remote(receiver))
    with pytest.raises(WaitTimeoutError, match="the receiving end of channel 1 to be used"):
        sender.send(1, timeout=0.05)


@pytest.mark.parametrize(("timeout", "kind"), [("1", TypeError), (float("nan"), ValueError)])
def test_a_timeout_that_is_none_is_refused_before_anything_is_sent_or_taken(engine, timeout, kind):
    sender, receiver = conveyor.channel.open()
    with pytest.raises(kind, match="timeout must be a number"):
        sender.send(1, timeout)
    assert sender.statistics().values == 0
    sender.send(2)
    with pytest.raises(kind, match="timeout must be a number"):
        receiver.receive(timeout)
    assert receiver.receive() == 2


def test_statistics_count_at_both_ends(engine):
    sender, receiver = conveyor.channel.open(depth=5)
    assert sender.statistics() == receiver.statistics()
    assert sender.statistics().depth == 8
    for i in range(3):
        sender.send(i)
    receiver.receive()
    assert (sender.statistics().values, sender.statistics().waiting) == (3, 2)
    assert (receiver.statistics().values, receiver.statistics().waiting) == (1, 2)
    assert sender.statistics().bytes > receiver.statistics().bytes > 0


# What goes wrong


@pytest.mark.parametrize("used", [True, False])
def test_a_killed_sender_wakes_the_receiver(local, used):
    sender, receiver = conveyor.channel.open()
    party = Party.remote()
    pid = get(party.keep.remote(sender))
    if used:
        done = party.send.remote([1, 2], False)
        assert receiver.receive(WAIT) == 1
        get(done)
    failed = []

    def receive():
        try:
            while True:
                failed.append(receiver.receive(WAIT))
        except ConveyorError as error:
            failed.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    os.kill(pid, signal.SIGKILL)
    thread.join(WAIT)
    assert failed[:-1] == ([2] if used else [])
    assert isinstance(failed[-1], ActorDiedError)
    assert "Party" in str(failed[-1])


@pytest.mark.parametrize("used", [True, False])
def test_a_killed_receiver_wakes_the_sender(local, used):
    sender, receiver = conveyor.channel.open(depth=2)
    party = Party.remote()
    pid = get(party.keep.remote(receiver))
    if used:
        first = party.receive.remote(1)
        sender.send(0)
        assert get(first) == [0]
    killer = threading.Timer(0.1, os.kill, (pid, signal.SIGKILL))
    killer.start()

    with pytest.raises(ActorDiedError, match="Party"):
        flood(sender)
    killer.join()


def test_a_killed_actor_wakes_another_actor(local):
    sender, receiver = conveyor.channel.open()
    a, b = Party.remote(), Party.remote()
    pid = get(a.keep.remote(sender))
    result = b.receive.remote(2, receiver)
    get(a.send.remote([1], False))
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ActorDiedError, match="Party"):
        get(result)


def test_an_end_that_nobody_refers_to_is_closed(engine):
    sender, receiver = conveyor.channel.open()
    sender.send(1)
    del sender
    assert list(receiver) == [1]
    _, receiver = conveyor.channel.open()
    del _
    if engine == "local":
        with pytest.raises(ChannelClosedError):
            receiver.receive(WAIT)


def test_an_actor_that_drops_its_end_closes_it(local):
    sender, receiver = conveyor.channel.open()
    party = Party.remote()
    get(party.keep.remote(sender))
    done = party.send.remote([1], False)
    assert receiver.receive(WAIT) == 1
    get(done)
    get(party.drop.remote())
    assert list(receiver) == []


def test_an_actor_that_has_nothing_to_send_closes_what_it_drops(local):
    sender, receiver = conveyor.channel.open()
    party = Party.remote()
    done = party.send.remote([], False, sender)
    assert list(receiver) == []
    get(done)


def test_an_end_that_is_closed_before_it_was_used(local):
    sender, receiver = conveyor.channel.open()
    result = Party.remote().all.remote(receiver)
    sender.close()
    assert get(result) == []


@pytest.mark.parametrize("where", ["here", "in an actor"])
@pytest.mark.parametrize("closed", ["sender", "receiver"])
def test_an_end_that_is_closed_before_either_was_used(engine, where, closed):
    ends = dict(zip(("sender", "receiver"), conveyor.channel.open(depth=2), strict=True))
    if where == "here":
        ends[closed].close()
        for _ in range(3):
            with pytest.raises(ChannelClosedError, match=closed.removesuffix("er")):
                ends["sender"].send(1, WAIT) if closed == "receiver" else ends["receiver"].receive(
                    WAIT
                )
    else:
        assert get(Party.remote().close_and_use.remote(*ends.values(), closed)) == [
            "ChannelClosedError"
        ]


@pytest.mark.parametrize("handle", ["held", "dropped"])
def test_a_receiver_that_has_died_is_named_though_its_handle_has_gone(local, handle, wait_until):
    sender, receiver = conveyor.channel.open(depth=2)
    party = Party.remote()
    pid = get(party.keep.remote(receiver))
    first = party.receive.remote(1)
    sender.send(0)
    assert get(first) == [0]
    os.kill(pid, signal.SIGKILL)
    if handle == "dropped":
        del party, first
        # Whoever looks after the death has done so, and lets go of what nobody can ask for.
        wait_until(
            lambda: all(one.state == "dead" for one in inside.statuses()[1:]), WAIT, "the death"
        )
    for _ in range(3):
        with pytest.raises(ActorDiedError, match=r"actor Party.* died of signal 9 \(SIGKILL\)"):
            flood(sender)


def test_a_receiving_end_that_is_closed_while_it_is_looked_for_room(local, monkeypatch):
    """By then there is room: what was sent is not in the way any more."""
    sender, receiver = conveyor.channel.open(depth=1)
    party = Party.remote()
    get(party.keep.remote(receiver))
    del receiver
    received = party.receive.remote(1)
    sender.send(1, WAIT)
    assert get(received) == [1]
    sender.send(2, WAIT)
    look = Sender._has_room

    def closed_meanwhile(self):
        assert not look(self)
        get(party.drop.remote())
        end = time.monotonic() + WAIT
        while not look(self) and time.monotonic() < end:
            time.sleep(0.002)
        return look(self)

    monkeypatch.setattr(Sender, "_has_room", closed_meanwhile)
    with pytest.raises(ChannelClosedError, match="the receiving end"):
        sender.send(3, WAIT)


def test_an_end_belongs_to_the_process_that_uses_it(local):
    sender, receiver = conveyor.channel.open()
    sender.send(1)
    with pytest.raises(ConveyorError, match="belongs to the process that first uses it"):
        Party.remote().all.remote(receiver)
    sender, receiver = conveyor.channel.open()
    party = Party.remote()
    done = party.send.remote([1], False, sender)
    assert receiver.receive(WAIT) == 1
    get(done)
    with pytest.raises(RuntimeStateError, match="belongs to another process"):
        sender.send(2)


def test_an_end_of_a_session_that_has_ended(leaves_nothing):
    with leaves_nothing():
        conveyor.init(engine="local")
        sender, receiver = conveyor.channel.open()
        pickled = pickle.dumps(sender)
        other, rest = conveyor.channel.open()
        other.send(1)
        conveyor.shutdown()
    with pytest.raises(SessionEndedError):
        rest.receive()
    with pytest.raises(SessionEndedError):
        other.send(1)
    with pytest.raises(SessionEndedError):
        receiver.receive()
    other.close()
    with pytest.raises(RuntimeStateError, match="another session"):
        pickle.loads(pickled)


def test_shutdown_wakes_who_waits(leaves_nothing, wait_until):
    with leaves_nothing():
        conveyor.init(engine="local")
        sender, receiver = conveyor.channel.open()
        raised = []

        def receive():
            try:
                receiver.receive()
            except SessionEndedError as error:
                raised.append(error)

        thread = threading.Thread(target=receive)
        thread.start()
        wait_until(lambda: receiver._peer is not None)
        conveyor.shutdown()
        thread.join(WAIT)
        assert len(raised) == 1
        sender.close()


def test_a_value_that_cannot_be_sent_leaves_the_channel_as_it_was(engine):
    sender, receiver = conveyor.channel.open()
    with pytest.raises(SerializationError):
        sender.send(threading.Lock())
    sender.send("then")
    assert receiver.receive() == "then"


@pytest.mark.parametrize(
    ("depth", "kind"),
    [
        (0, ValueError),
        (-1, ValueError),
        (1 << 20, ValueError),
        (1.5, TypeError),
        ("8", TypeError),
        (None, TypeError),
        (True, TypeError),
    ],
)
def test_a_depth_that_is_none(engine, depth, kind):
    with pytest.raises(kind, match="depth must be"):
        conveyor.channel.open(depth=depth)


@pytest.mark.parametrize(("timeout", "kind"), [("1", TypeError), (float("nan"), ValueError)])
def test_a_timeout_that_is_none(engine, timeout, kind):
    _sender, receiver = conveyor.channel.open()
    with pytest.raises(kind, match="timeout must be"):
        receiver.receive(timeout)


def test_a_forked_child_cannot_use_an_end(local):
    sender, receiver = conveyor.channel.open()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            sender.send(1)
        except RuntimeStateError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    sender.send(2)
    pid = os.fork()
    if pid == 0:
        del sender, receiver
        os._exit(0)
    os.waitpid(pid, 0)
    assert receiver.receive() == 2
    sender.send(3)
    assert receiver.receive() == 3


# asyncio


def test_ends_are_awaited(local):
    sender, receiver = conveyor.channel.open(depth=2)

    async def main():
        async def send():
            for i in range(100):
                await sender.send_async(i)
            sender.close()

        sending = asyncio.create_task(send())
        got = [value async for value in receiver]
        await sending
        return got

    assert asyncio.run(asyncio.wait_for(main(), WAIT)) == list(range(100))


def test_coroutines_of_actors_send_and_receive(local):
    sender, receiver = conveyor.channel.open(depth=2)
    a, b = Coroutines.remote(), Coroutines.remote()
    result = b.all.remote(receiver)
    assert get(b.ping.remote()) == "pong"
    done = a.send.remote(sender, list(range(200)))
    assert get(result) == list(range(200))
    get(done)


def test_a_killed_sender_wakes_a_coroutine(local):
    sender, receiver = conveyor.channel.open()
    party = Party.remote()
    pid = get(party.keep.remote(sender))

    async def main():
        waiting = asyncio.create_task(receiver.receive_async())
        await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        await waiting

    with pytest.raises(ActorDiedError, match="Party"):
        asyncio.run(asyncio.wait_for(main(), WAIT))


def test_a_cancelled_receive_takes_nothing(local):
    sender, receiver = conveyor.channel.open()

    async def main():
        waiting = asyncio.create_task(receiver.receive_async())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        sender.send(1)
        return await receiver.receive_async()

    assert asyncio.run(asyncio.wait_for(main(), WAIT)) == 1


def test_refs_travel_as_refs(local):
    sender, receiver = conveyor.channel.open()
    ref = Party.remote().pid.remote()
    sender.send([ref])
    assert get(receiver.receive()[0]) == get(ref)


def test_threads_share_an_end(local):
    sender, receiver = conveyor.channel.open(depth=4)
    got = []
    threads = [
        threading.Thread(target=lambda: got.extend(receiver)),
        threading.Thread(target=lambda: got.extend(receiver)),
    ]
    for thread in threads:
        thread.start()
    for i in range(2000):
        sender.send(i, WAIT)
    sender.close()
    for thread in threads:
        thread.join(WAIT)
    assert sorted(got) == list(range(2000))


def test_an_actor_that_was_started_again_gets_another_channel(local):
    sender, receiver = conveyor.channel.open()
    party = Party.options(max_restarts=1).remote()
    pid = get(party.keep.remote(receiver))
    first = party.receive.remote(1)
    sender.send(1)
    assert get(first) == [1]
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ActorDiedError):
        flood(sender)
    sender, receiver = conveyor.channel.open()
    again = None
    while again is None:
        try:
            again = party.receive.remote(1, receiver)
            sender.send(2, WAIT)
        except ActorDiedError:
            again = None
    assert get(again) == [2]


def test_an_end_that_cannot_be_opened_is_closed_for_the_other(local):
    """The process at the one end has no descriptor left when it is introduced."""
    sender, receiver = conveyor.channel.open()
    starved = Starved.remote()
    result = starved.receive.remote(receiver)
    with pytest.raises(ChannelClosedError, match="the receiving end of channel 1 is closed"):
        flood(sender)
    with pytest.raises(OSError, match="refused"):
        get(result)


def test_nothing_is_kept_for_channels_that_are_over(local, wait_until):
    for end in range(2):
        for used in range(2):
            ends = conveyor.channel.open()
            party = Party.remote()
            pid = get(party.keep.remote(ends[end]))
            if used:
                party.receive.remote(1) if end else party.send.remote([1])
            os.kill(pid, signal.SIGKILL)
            mine = ends[1 - end]
            with pytest.raises((ActorDiedError, ChannelClosedError)):
                flood(mine) if end else [mine.receive(WAIT), mine.receive(WAIT)]
            mine.close()
            wait_until(lambda: not inside.channels_known(), what="the channel to be forgotten")
    conveyor.channel.open()
    wait_until(
        lambda: not inside.channels_known(), what="a channel that nobody has used to be forgotten"
    )
