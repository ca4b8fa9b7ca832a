"""Calls that wait for an argument are sent when that is there, whoever else waits meanwhile."""

import gc
import os
import signal
import threading
import time
import weakref

import inside
import pytest
from integration_helpers import WAIT, get

import conveyor
from conveyor.exceptions import WaitTimeoutError

pytestmark = pytest.mark.usefixtures("fresh_session")


@conveyor.remote(max_concurrency=8)
class Gate:
    def __init__(self):
        self.goes_on = threading.Event()
        self.seen = threading.Event()

    def wait(self, value=1):
        self.goes_on.wait(WAIT)
        return value

    def go_on(self):
        self.goes_on.set()

    def add(self, value):
        self.seen.set()
        return value + 1

    def has_seen(self):
        return self.seen.wait(WAIT)


class WhenSent:
    """Runs code in this process when the call is sent: with a ref inside it is decoded then, and encoded."""

    def __init__(self, code, ref=None):
        self.code = code
        self.ref = conveyor.put(0) if ref is None else ref

    def __reduce__(self):
        number = len(WHEN_SENT)
        WHEN_SENT.append(self.code)
        return run_here, (os.getpid(), number, self.ref)


WHEN_SENT = []


def run_here(process, number, ref):
    if process == os.getpid():
        WHEN_SENT[number]()
    return 5


def is_being_got(ref):
    try:
        conveyor.get(ref, timeout=0.01)
    except WaitTimeoutError as error:
        return "another thread of this process is getting it" in str(error)
    raise AssertionError("it is done")


def interrupted(handler, body):
    """Run ``body`` in the main thread, with ``handler`` in the middle of its wait."""
    before = signal.signal(signal.SIGALRM, lambda *_: handler())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        return body()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_call_that_nobody_waits_for_is_sent():
    first, second = Gate.remote(), Gate.remote()
    second.add.remote(first.wait.remote())
    get(first.go_on.remote())
    assert get(second.has_seen.remote())


def test_who_waits_for_a_call_that_is_not_sent_is_told_what_it_lacks():
    first, second, third = (Gate.options(name=name).remote() for name in ("one", "two", "three"))
    held = first.wait.remote(1)
    between = second.add.remote(held)
    last = third.add.remote(between)
    # What has been sent to the first waits behind nothing; what has not waits for the second in its turn.
    behind = first.add.remote(last)
    lacking = r"wait for one\.wait \(call 1\); one is "
    for actor, ref in (("two", between), ("three", last), ("one", behind)):
        said = rf"{actor}\.add \(not sent yet\); {actor} is .*calls for {actor} {lacking}"
        with pytest.raises(WaitTimeoutError, match=said):
            conveyor.get(ref, timeout=0.1)
    with pytest.raises(WaitTimeoutError, match=rf"calls for three {lacking}"):
        conveyor.get([last, behind], timeout=0.1)
    conveyor.cancel(behind)  # or what lets the first go on would wait behind it
    get(first.go_on.remote())
    assert get(last) == 3


def test_a_handler_that_waits_in_the_middle_of_a_wait():
    first, second, third, other = (Gate.remote() for _ in range(4))
    outer = second.add.remote(first.wait.remote())
    inner = []

    def handler():
        inner.append(get(other.add.remote(third.wait.remote(5))))
        get(first.go_on.remote())

    get(third.go_on.remote())
    assert interrupted(handler, lambda: get(outer)) == 2
    assert inner == [6]
    # Both waits are over: now nobody sends but the thread that is there for it.
    fourth, fifth = Gate.remote(), Gate.remote()
    fifth.add.remote(fourth.wait.remote())
    get(fourth.go_on.remote())
    assert get(fifth.has_seen.remote())


def test_a_wait_that_is_broken_off():
    first, second = Gate.remote(), Gate.remote()
    waiting = second.add.remote(first.wait.remote())

    def stop():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted(stop, lambda: get(waiting))
    get(first.go_on.remote())
    assert get(second.has_seen.remote())


def test_who_waits_for_one_call_does_not_send_those_of_others():
    first, second, third, fourth = (Gate.remote() for _ in range(4))
    goes_on = threading.Event()
    late = third.wait.remote()
    slow = WhenSent(lambda: goes_on.wait(WAIT))
    other = second.__ray_call__.remote(lambda self, one, two: one + two, slow, late)
    waiting = fourth.add.remote(first.wait.remote())
    get(third.go_on.remote())
    began = time.monotonic()
    with pytest.raises(WaitTimeoutError):
        conveyor.get(waiting, timeout=0.2)
    assert time.monotonic() - began < WAIT / 2
    goes_on.set()
    assert get(other) == 6
    get(first.go_on.remote())
    assert get(waiting) == 2


@pytest.mark.parametrize("retries", [0, 1])
def test_who_gets_a_result_while_what_it_is_an_argument_of_is_sent(wait_until, retries):
    """The result has come by then, and whoever gets it has not looked yet: he waits to send, too."""
    first, second = Gate.remote(), Gate.remote()
    add = second.add.options(max_task_retries=retries)
    argument = add.remote(first.wait.remote())
    until_done = WhenSent(lambda: conveyor.wait([argument], timeout=WAIT), argument)
    second.__ray_call__.remote(lambda self, one: one, until_done)
    last = second.add.remote(argument)
    got = []
    gets = threading.Thread(target=lambda: got.append(get(argument)), daemon=True)
    gets.start()
    wait_until(lambda: is_being_got(argument), WAIT)
    get(first.go_on.remote())
    assert get(last) == 3
    gets.join(WAIT)
    assert got == [2]


def test_chains_from_many_threads():
    actors = [Gate.remote() for _ in range(3)]
    got = []

    def chain(number):
        ref = number
        for turn in range(20):
            ref = actors[turn % 3].add.remote(ref)
        got.append(get(ref) - number)

    chains = [threading.Thread(target=chain, args=(number,)) for number in range(6)]
    for one in chains:
        one.start()
    for one in chains:
        one.join(WAIT)
    assert got == [20] * 6


def test_an_actor_that_is_dead_is_not_held():
    first, second = Gate.remote(), Gate.remote()
    added = second.add.remote(first.wait.remote())
    get(first.go_on.remote())
    # The thread that is there for it has sent it: who waits so does not.
    assert conveyor.wait([added], timeout=WAIT)[0]
    del added
    link = weakref.ref(inside.link_to(second))
    conveyor.kill(second)
    del second
    end = time.monotonic() + WAIT
    while link() is not None and time.monotonic() < end:
        gc.collect()
        conveyor.get(first.go_on.remote())
    assert link() is None


def test_an_argument_that_ends_the_session_when_it_is_sent(scripts):
    program = """
        import os, sys, threading, time
        import conveyor

        told, on = sys.told, sys.on = threading.Event(), []

        def end(process, ref):
            if process == os.getpid():
                sys.on.append(threading.current_thread())
                conveyor.shutdown()
                sys.told.set()

        class Ends:
            # What has a ref inside is decoded when it is sent, and encoded anew.
            def __reduce__(self):
                return end, (os.getpid(), conveyor.put("x" * 5000))

        @conveyor.remote
        class Actor:
            def hold(self):
                end = time.monotonic() + 60
                while not os.path.exists("go") and time.monotonic() < end:
                    time.sleep(0.002)

            def take(self, *args):
                return len(args)

        a, b = Actor.remote(), Actor.remote()
        ref = b.take.remote(a.hold.remote(), Ends())
        open("go", "w").close()
        print(told.wait(60), on[0].name, conveyor.is_initialized())
        on[0].join(60)
        print(on[0].is_alive())
    """
    assert scripts.run(program) == "True conveyor-pump False\nFalse\n"


@conveyor.remote
class Log:
    """Notes what it was called with."""

    def __init__(self):
        self.notes = []

    def note(self, what, *_):
        self.notes.append(what)
        return what

    def all(self):
        return self.notes


@pytest.mark.parametrize("nested", ["call", "get", "cancel it", "cancel the next", "again"])
def test_code_of_an_argument_uses_the_actor_whose_call_is_being_sent(nested):
    """No call is made twice, and none is forgotten."""
    gate, log = Gate.remote(), Log.remote()
    made = []

    def code():
        if made:  # it may be tried again
            return
        if nested == "cancel the next":
            second.cancel()
        made.append(log.note.remote("nested"))
        if nested == "get":
            assert get(made[0]) == "nested"
        elif nested == "cancel it":
            first.cancel()
        elif nested == "again":
            innermost = WhenSent(lambda: made.append(log.note.remote("innermost")), second)
            made.append(log.note.remote("again", innermost, second))

    late = gate.wait.remote()
    first = log.note.remote("first", WhenSent(code, late), late)
    second = log.note.remote("second", late)
    third = log.note.remote("third")
    get(gate.go_on.remote())
    assert get(third) == "third"
    if nested != "cancel the next":
        assert get(second) == "second"
    if nested != "cancel it":
        assert get(first) == "first"
    conveyor.get(made, timeout=WAIT)
    noted = get(log.all.remote())
    wanted = {"first", "second", "third", "nested"}
    wanted -= {"cancel it": {"first"}, "cancel the next": {"second"}}.get(nested, set())
    if nested == "again":
        wanted |= {"again", "innermost"}
    if nested == "cancel it" and "first" in noted:  # it was begun before that was seen
        noted.remove("first")
    assert sorted(noted) == sorted(wanted)
