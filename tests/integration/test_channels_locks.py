"""Ends that are used where somebody holds a lock: in a handler or a finalizer, and in a forked child."""

import threading

from integration_helpers import WAIT, get

import conveyor
from conveyor.exceptions import WaitTimeoutError
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
        free = driver.introductions.lock.acquire(timeout=1)
        if free:
            driver.introductions.lock.release()
            unused.close()
    sent = sending.send.remote("value")
    assert get(received) == "value"
    get(sent)
    assert free
