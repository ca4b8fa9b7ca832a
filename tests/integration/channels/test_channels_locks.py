"""Ends that are used where somebody holds a lock: in a handler or a finalizer, and in a forked child."""

import os
import signal
import threading

import pytest
from integration_helpers import WAIT, get

import conveyor
from conveyor.exceptions import RuntimeStateError, WaitTimeoutError
from conveyor.runtime import context


@conveyor.remote
class Party:
    def keep(self, end):
        self.end = end

    def begin_to_send(self):
        try:
            self.end.send(1, timeout=0)
        except WaitTimeoutError:
            return "nobody receives"

    def receive(self):
        return self.end.receive(WAIT)

    def send(self, value):
        self.end.send(value, WAIT)


def test_who_introduces_two_actors_waits_for_no_lock_of_the_table(local, monkeypatch):
    """Or a handler that closes an end while its thread holds that lock would wait for ever, and so would a
    finalizer."""
    driver = context.running()
    sending, receiving = Party.remote(), Party.remote()
    unused, _receiver = conveyor.channel.open()
    sender, receiver = conveyor.channel.open()
    get(sending.keep.remote(sender))
    get(receiving.keep.remote(receiver))
    assert get(sending.begin_to_send.remote()) == "nobody receives"
    introducing = threading.Event()
    duplicates = driver.network.duplicates

    def told(records):
        introducing.set()
        return duplicates(records)

    monkeypatch.setattr(driver.network, "duplicates", told)
    with driver.table.lock:
        received = receiving.receive.remote()
        assert introducing.wait(WAIT)
        free = driver.introductions.lock.acquire(timeout=WAIT)  # others may have it for a moment
        if free:
            driver.introductions.lock.release()
            unused.close()
    sent = sending.send.remote("value")
    assert get(received) == "value"
    get(sent)
    assert free


class Slow:
    """Its encoding waits, with the lock of the end that sends it."""

    def __init__(self, encoding, go):
        self.encoding, self.go = encoding, go

    def __reduce__(self):
        self.encoding.set()
        assert self.go.wait(WAIT)
        return int, (1,)


@pytest.mark.parametrize(
    "use",
    [
        lambda sender, _: sender.close(),
        lambda sender, _: sender.send(1, timeout=1),
        lambda sender, _: sender.statistics(),
        lambda _, receiver: receiver.receive(timeout=1),
    ],
    ids=["close", "send", "statistics", "receive"],
)
def test_a_child_that_was_forked_while_a_thread_used_an_end(engine, use):
    sender, receiver = conveyor.channel.open()
    sender.send(0)
    encoding, go = threading.Event(), threading.Event()
    sending = threading.Thread(target=sender.send, args=(Slow(encoding, go),))
    sending.start()
    assert encoding.wait(WAIT)
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)  # it would wait for ever
        code = 1
        try:
            use(sender, receiver)
        except RuntimeStateError as error:
            code = 0 if "forked" in str(error) else 2
        finally:
            os._exit(code)
    go.set()
    sending.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert [receiver.receive(), receiver.receive()] == [0, 1]
