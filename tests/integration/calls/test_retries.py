"""Calls that are made again where they fail: ``max_task_retries`` and ``retry_exceptions``."""

import asyncio
import gc
import os
import pickle
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import numpy as np
import pytest
from integration_helpers import WAIT, get

import conveyor
from conveyor import channel
from conveyor.calls.pending import CallRef
from conveyor.exceptions import (
    ActorDiedError,
    ActorRestartedError,
    ConstructorError,
    ExecutionCancelledError,
    SerializationError,
    SessionEndedError,
    TaskError,
    WaitTimeoutError,
)
from conveyor.runtime import context
from conveyor.worker.calling import CallingRuntime


@conveyor.remote
class Flaky:
    """What it does fails so many times first."""

    def __init__(self, noted=None):
        self.tries = 0
        self.noted = noted
        self.values = []
        self.room = np.zeros(20_000, int)

    def work(self, failures, kind=ValueError, value=0):
        self.tries += 1
        if self.tries <= failures:
            raise kind(f"at try {self.tries}")
        tries, self.tries = self.tries, 0
        return tries, float(np.asarray(value).sum())

    @conveyor.method(max_task_retries=3, retry_exceptions=True)
    def declared(self, failures):
        return self.work(failures)[0]

    @conveyor.method(
        num_returns=2,
        max_task_retries=3,
        retry_exceptions=[ValueError],
        tensor_transport="auto",
    )
    def two(self, failures):
        tries, _ = self.work(failures)
        return np.full(20_000, tries), "second"

    @conveyor.method(receive_into={"value": "room"})
    def receive(self, value):
        self.tries += 1
        return float(value.sum())

    def numbers(self, n):
        yield from range(n)

    @conveyor.method(max_task_retries=3, retry_exceptions=True)
    def given(self, failures, *args, **kwargs):
        self.work(failures)
        return args, kwargs

    def echo(self, value):
        self.tries += 1
        return value

    def sleep(self, seconds):
        time.sleep(seconds)
        return seconds

    def log(self, value):
        self.values.append(value)

    def logged(self):
        return self.values

    def of(self, refs):
        return conveyor.get(refs[0], timeout=WAIT)

    def fail_with(self, value):
        raise ValueError(value)

    def outstanding(self):
        return self.tries

    def change_and_fail(self, failures, values):
        values.append(len(values))
        self.tries += 1
        if self.tries <= failures:
            raise ValueError(f"at try {self.tries}")
        return values

    def stay_once(self, _value):
        """The first process of it does not come to its end."""
        with open(self.noted, "a") as file:
            file.write("x")
        if (size := os.path.getsize(self.noted)) == 1:
            time.sleep(3600)
        return size

    def die(self, deaths):
        """That many processes die of it."""
        with open(self.noted, "a") as file:
            file.write("x")
        if os.path.getsize(self.noted) <= deaths:
            os.kill(os.getpid(), signal.SIGKILL)
        return os.path.getsize(self.noted)

    def pid(self):
        return os.getpid()


def with_retries(actor, most=2, exceptions=True):
    return actor.work.options(max_task_retries=most, retry_exceptions=exceptions)


@pytest.fixture
def flaky(engine):
    return Flaky.remote()


def test_a_method_that_raises_is_called_again(flaky):
    assert get(flaky.declared.remote(2)) == 3
    assert get(with_retries(flaky).remote(2)) == (3, 0)
    assert get(with_retries(flaky, 50, [KeyError, ValueError]).remote(40))[0] == 41


def test_the_last_error_is_told_where_all_tries_fail(flaky):
    ref = flaky.declared.remote(4)
    for _ in range(2):
        with pytest.raises(ValueError, match="at try 4") as caught:
            get(ref)
    assert isinstance(caught.value, TaskError)
    assert caught.value.actor == "Flaky"
    assert "this was try 4, the last of a call with max_task_retries=3" in str(caught.value)
    assert ref.has_failed()


def test_what_is_not_named_is_not_tried_again(flaky):
    for method in (
        flaky.work,
        flaky.work.options(max_task_retries=5),
        flaky.work.options(retry_exceptions=True),
        with_retries(flaky, 5, [KeyError]),
        flaky.declared.options(max_task_retries=0),
        flaky.declared.options(retry_exceptions=False),
    ):
        with pytest.raises(ValueError, match="at try 1"):
            get(method.remote(1))
        get(flaky.work.remote(0))


def test_an_error_of_an_argument_is_nobodys_to_try_again(flaky):
    with pytest.raises(ValueError, match="at try 1"):
        get(with_retries(flaky, -1).remote(0, ValueError, flaky.work.remote(1)))
    assert get(flaky.outstanding.remote()) == 1


class Left(BaseException):
    """What is no ``Exception``."""


def test_what_comes_as_no_instance_of_its_class_is_known_by_it(flaky):
    for kind in (Left, StopIteration, GeneratorExit):
        assert get(with_retries(flaky, 2, [kind]).remote(2, kind)) == (3, 0)
        with pytest.raises(TaskError, match="at try 1"):
            get(with_retries(flaky, 2, [KeyError]).remote(1, kind))
        get(flaky.work.remote(0))


@conveyor.remote
class Unmade:
    def __init__(self):
        raise ValueError("not made")

    def work(self):
        """It never comes to this."""


def test_what_has_not_begun_is_nobodys_to_try_again(flaky):
    unmade = Unmade.remote()
    options = {"max_task_retries": -1, "retry_exceptions": True}
    with pytest.raises(ConstructorError, match="not made"):
        get(unmade.work.options(**options).remote())

    def asks(self, unmade):
        self.tries += 1
        get(unmade.work.remote())

    # Whoever has called it has run.
    options["max_task_retries"] = 2
    with pytest.raises(ConstructorError, match="not made"):
        get(flaky.__ray_call__.options(**options).remote(asks, unmade))
    assert get(flaky.outstanding.remote()) == 3


def test_what_cannot_be_fetched_is_nobodys_to_try_again(local, wait_until):
    flaky, maker = Flaky.remote(), Flaky.remote()
    array, _ = maker.two.remote(0)
    assert get(flaky.work.remote(0, ValueError, array)) == (1, 20_000)
    conveyor.kill(maker)

    def is_gone():
        try:
            get(flaky.work.remote(0, ValueError, array))
        except ActorDiedError:
            return True
        return False

    wait_until(is_gone, WAIT)
    options = {"max_task_retries": -1, "retry_exceptions": True}
    for method in (flaky.receive, flaky.echo):
        with pytest.raises(ActorDiedError, match="with it a value"):
            get(method.options(**options).remote(array))
    with pytest.raises(ValueError, match="cannot receive 'value'"):
        get(flaky.receive.options(**options).remote(np.zeros(3, int)))
    assert get(flaky.outstanding.remote()) == 0


def test_several_results_that_stay_with_the_actor(flaky):
    array, second = flaky.two.remote(2)
    assert get(array).sum() == 3 * 20_000
    assert get(second) == "second"
    assert array.tensor_transport() == "auto"
    other = Flaky.remote()
    assert get(other.work.remote(0, ValueError, array)) == (1, 3 * 20_000)


def test_arguments_are_what_they_were_when_the_call_was_made(flaky):
    values, array = [1, 2], np.ones(1000)
    method = flaky.change_and_fail.options(max_task_retries=3, retry_exceptions=True)
    ref = method.remote(3, values)
    summed = with_retries(Flaky.remote(), 9).remote(6, ValueError, value=array)
    values.append("later")
    array[:] = 7
    assert get(ref) == [1, 2, 2]
    assert get(summed)[1] == 1000


def test_a_stream_that_is_an_argument_is_the_same_list_at_each_try(flaky):
    def numbers():
        return flaky.numbers.remote(3)

    for failures in (0, 2):
        assert get(flaky.given.remote(failures, numbers())) == (([0, 1, 2],), {})
        given = flaky.given.remote(failures, [1], numbers(), last={2: 3}, x=numbers(), y=4)
        expected = ([1], [0, 1, 2]), {"last": {2: 3}, "x": [0, 1, 2], "y": 4}
        assert get(given) == expected
        begun = numbers()
        assert next(begun) == 0
        assert get(flaky.given.remote(failures, flaky.echo.remote("ref"), begun)) == (
            ("ref", [1, 2]),
            {},
        )


def test_it_is_a_ref_like_any_other(flaky):
    other = Flaky.remote()
    assert get(other.of.remote([flaky.declared.remote(2)])) == 3
    assert flaky.declared.remote(1).future().result(WAIT) == 2
    refs = [flaky.declared.remote(2), other.declared.remote(1)]
    done, rest = conveyor.wait(refs, num_returns=2, timeout=WAIT)
    assert (done, rest) == (refs, [])
    assert get(pickle.loads(pickle.dumps(flaky.declared.remote(1)))) == 2
    assert get(pickle.loads(pickle.dumps(with_retries(flaky))).remote(2))[0] == 3
    assert with_retries(flaky) == with_retries(flaky)
    assert with_retries(flaky) != flaky.work

    async def awaited():
        return await asyncio.wait_for(flaky.declared.remote(2), WAIT)

    assert asyncio.run(awaited()) == 3


def test_an_actor_may_name_a_class_that_only_it_has(flaky):
    def makes(self):
        class Own(Exception):
            pass

        class Made(Flaky.__wrapped__):
            @conveyor.method(max_task_retries=2, retry_exceptions=[Own])
            def own(self, failures):
                return self.work(failures, Own)[0]

        made = conveyor.remote(Made).options(name="made").remote()
        same = pickle.loads(pickle.dumps(made.own)) == made.own
        return same, conveyor.get(made.own.remote(2), timeout=WAIT)

    assert get(flaky.__ray_call__.remote(makes)) == (True, 3)
    assert get(conveyor.get_actor("made").own.remote(2)) == 3
    with pytest.raises(TaskError, match="at try 1"):
        get(conveyor.get_actor("made").own.options(retry_exceptions=[KeyError]).remote(1))


def test_nobody_needs_to_wait_for_it(flaky, wait_until):
    with_retries(flaky, 9).remote(9)
    gc.collect()
    wait_until(lambda: get(flaky.outstanding.remote()) == 0, WAIT)


def test_what_is_no_number_and_no_exception(flaky):
    for options, kind, words in (
        ({"max_task_retries": -2}, ValueError, "max_task_retries must be -1"),
        ({"max_task_retries": "x"}, TypeError, "max_task_retries must be an integer"),
        ({"max_task_retries": True}, TypeError, "max_task_retries must be an integer"),
        ({"retry_exceptions": 3}, TypeError, "retry_exceptions is True, False or a list"),
        ({"retry_exceptions": [3]}, TypeError, "no class of exceptions"),
        ({"retry_exceptions": [int]}, TypeError, "no class of exceptions"),
    ):
        with pytest.raises(kind, match=words):
            flaky.work.options(**options)
        with pytest.raises(kind, match=words):
            conveyor.method(**options)
    with pytest.raises(ValueError, match="max_task_retries must be -1"):
        Flaky.options(max_task_retries=-2)


def test_what_cannot_be_sent_is_named_as_of_any_call(flaky):
    for method in (flaky.work, with_retries(flaky)):
        with pytest.raises(SerializationError, match=r"argument 'value' of Flaky.work, a list"):
            method.remote(0, value=[threading.Lock()])


def test_generators_are_not_called_again():
    with pytest.warns(UserWarning, match="is a generator, which is not called again"):

        @conveyor.method(max_task_retries=2, retry_exceptions=True)
        def items(self):
            yield 1

    class Streams:
        def items(self, broken):
            yield 1
            if broken:
                raise ValueError("after one")

    conveyor.init()
    streams = conveyor.remote(max_task_retries=3)(Streams).remote()
    with pytest.warns(UserWarning, match=r"Streams.items is a generator"):
        method = streams.items.options(retry_exceptions=True)
    ref = method.remote(True)
    assert next(ref) == 1
    with pytest.raises(ValueError, match="after one"):
        next(ref)
    conveyor.shutdown()


# Where the actor's process may end.


def test_a_call_whose_actor_has_died_is_made_again(local, tmp_path):
    actor = Flaky.options(max_restarts=-1, max_task_retries=2).remote(str(tmp_path / "noted"))
    before = get(actor.pid.remote())
    assert get(actor.die.remote(2)) == 3
    assert get(actor.pid.remote()) != before
    with pytest.raises(ValueError, match="at try 1"):  # only what has died is tried again
        get(actor.work.remote(1))


def test_as_often_as_it_may_be(local, tmp_path):
    actor = Flaky.options(max_restarts=-1, max_task_retries=1).remote(str(tmp_path / "noted"))
    with pytest.raises(ActorRestartedError):
        get(actor.die.options(max_task_retries=0).remote(1))
    with pytest.raises(ActorRestartedError, match="this was try 2, the last of a call with max"):
        get(actor.die.remote(3))
    assert get(actor.die.options(max_task_retries=-1).remote(5)) == 6


def test_an_actor_that_is_gone_for_good_ends_it(local, tmp_path):
    noted = str(tmp_path / "noted")
    actor = Flaky.options(max_restarts=1, max_task_retries=-1).remote(noted)
    with pytest.raises(ActorDiedError) as caught:
        get(actor.die.remote(5))
    assert not isinstance(caught.value, ActorRestartedError)
    assert os.path.getsize(noted) == 2
    with pytest.raises(ActorDiedError):
        get(Flaky.options(max_task_retries=-1).remote(noted).die.remote(9))


def test_they_are_made_again_in_their_order(local):
    actor = Flaky.options(max_restarts=-1, max_task_retries=-1).remote()
    pid = get(actor.pid.remote())
    holds = actor.sleep.options(max_task_retries=0).remote(WAIT)
    refs = [actor.log.remote(i) for i in range(200)]
    os.kill(pid, signal.SIGKILL)
    get(refs)
    assert get(actor.logged.remote()) == list(range(200))
    with pytest.raises(ActorRestartedError):
        get(holds)


@pytest.fixture
def struck(monkeypatch):
    """Whom to kill when it has been found alive, to be called."""
    known_link, pids = CallingRuntime._known_link, []

    def found(runtime, actor):
        link = known_link(runtime, actor)
        if pids and not link.gone:
            os.kill(pids.pop(), signal.SIGKILL)
            while not link.gone:
                runtime.inbox.wait(runtime.inbox.count, 0.01)
        return link

    monkeypatch.setattr(CallingRuntime, "_known_link", found)
    return pids


def test_an_actor_that_dies_when_it_is_about_to_be_called(local, struck):
    actor = Flaky.options(max_restarts=-1, max_task_retries=1).remote()
    pid = get(actor.pid.remote())
    struck.append(pid)
    assert get(actor.pid.remote()) != pid
    struck.append(get(actor.pid.remote()))
    with pytest.raises(ActorRestartedError):
        get(actor.pid.options(max_task_retries=0).remote())


def test_what_is_called_then_does_not_go_ahead_of_what_it_lacks(
    local, struck, tmp_path, wait_until
):
    noted = tmp_path / "noted"
    actor = Flaky.options(max_restarts=-1, max_task_retries=-1).remote(str(noted))
    pid = get(actor.pid.remote())
    lacked = actor.stay_once.remote(SlowHere())
    wait_until(noted.exists, WAIT)
    struck.append(pid)
    lacks = actor.echo.remote(lacked)
    SlowHere.allowed.set()  # only now the other one is made again
    assert get([lacked, lacks]) == [2, 2]


def test_calls_that_were_queued_are_made_again_and_so_are_those_of_actors(local, tmp_path):
    actor = Flaky.options(max_restarts=2, max_task_retries=1).remote(str(tmp_path / "noted"))
    caller = Flaky.remote()
    before = get(caller.__ray_call__.remote(lambda self, a: get(a.pid.remote()), actor))
    holds = actor.sleep.options(max_task_retries=0).remote(WAIT)
    queued = [actor.pid.remote() for _ in range(100)]
    os.kill(before, signal.SIGKILL)
    (after,) = set(get(queued))
    assert after != before
    with pytest.raises(ActorRestartedError):
        get(holds)
    dies = caller.__ray_call__.remote(lambda self, a: get(a.die.remote(1)), actor)
    assert get(dies) == 2
    assert get(actor.pid.remote()) not in (before, after)


def test_a_wait_has_its_time_and_can_be_cancelled(local, wait_until):
    flaky = Flaky.remote()
    ref = with_retries(flaky, -1).remote(10**9)
    wait_until(lambda: "try 2" in repr(ref), WAIT)
    with pytest.raises(WaitTimeoutError, match=r"after 0.2 s waiting for Flaky.work.*, try \d+;"):
        conveyor.get(ref, timeout=0.2)
    assert ref.cancel()
    with pytest.raises(ExecutionCancelledError):
        get(ref)
    assert ref.cancelled()
    assert not ref.cancel()
    # None is made any more, but the one that was being made just then.
    get(flaky.work.remote(0))
    assert max(get(flaky.outstanding.remote()) for _ in range(500)) <= 1


def test_the_end_of_the_session_is_the_last_tries(wait_until):
    conveyor.init()
    flaky, waits = Flaky.remote(), Flaky.remote()
    ref = with_retries(flaky, -1).remote(10**9)
    blocks = waits.__ray_call__.remote(lambda self: time.sleep(3600))
    unsent = with_retries(flaky, -1).remote(0, ValueError, blocks)
    conveyor.shutdown()
    for one in (ref, unsent):
        with pytest.raises(SessionEndedError):
            one.get(WAIT)
    # No thread goes on with it.
    wait_until(lambda: not any("retries" in one.name for one in threading.enumerate()), WAIT)


class SlowHere:
    """Where it was made first, it is loaded only when that is allowed."""

    loading, allowed = threading.Event(), threading.Event()

    def __init__(self, pid=None):
        self.pid = pid or os.getpid()
        if pid is None:
            self.loading.clear()
            self.allowed.clear()

    def __reduce__(self):
        return SlowHere.load, (self.pid,)

    @classmethod
    def load(cls, pid):
        if os.getpid() == pid:
            cls.loading.set()
            assert cls.allowed.wait(WAIT)
        return cls(pid)


def test_the_end_of_the_session_while_tries_are_being_made():
    conveyor.init()
    flaky = Flaky.remote()
    refs = [with_retries(flaky, -1).remote(10**9, ValueError, SlowHere()) for _ in range(2)]
    assert SlowHere.loading.wait(WAIT)
    conveyor.shutdown()
    for ref in reversed(refs):
        with pytest.raises(SessionEndedError):
            ref.get(WAIT)
    assert not conveyor.is_initialized()
    SlowHere.allowed.set()


def test_who_waits_for_another_that_gets_a_ref_begins_no_session():
    conveyor.init()
    ref = Flaky.remote().fail_with.remote(SlowHere())
    with ThreadPoolExecutor() as pool:
        gets = pool.submit(ref.get, WAIT)
        assert SlowHere.loading.wait(WAIT)
        conveyor.shutdown()
        with pytest.raises(SessionEndedError):
            ref.get(WAIT)
        assert not conveyor.is_initialized()
        SlowHere.allowed.set()
        with pytest.raises(ValueError, match="SlowHere"):
            gets.result(WAIT)


def test_what_makes_the_calls_goes_with_them(local, wait_until):
    runtime = context.running()
    flaky = Flaky.remote()
    assert get(with_retries(flaky).remote(2)) == (3, 0)
    # Its thread may not have come to its end yet.
    wait_until(lambda: gc.collect() >= 0 and not len(runtime.retrying), WAIT)


class LoadedBy:
    """It notes which threads of the process that has made it load it."""

    threads: ClassVar = []

    def __reduce__(self):
        return LoadedBy.load, (os.getpid(),)

    @classmethod
    def load(cls, pid):
        if os.getpid() == pid:
            cls.threads.append(threading.current_thread().name)
        return 0


def test_who_has_called_does_not_make_it_again_himself(local, monkeypatch):
    """Though the first try has failed by the time he looks at it a second time."""
    done = CallRef.done
    looks = []

    def late(ref):
        if looks or threading.current_thread() is not threading.main_thread():
            return done(ref)
        looks.append(ref)
        ready, _ = conveyor.wait([ref], timeout=WAIT)
        assert ready
        return False

    flaky = Flaky.remote()
    get(flaky.pid.remote())
    monkeypatch.setattr(CallRef, "done", late)
    ref = with_retries(flaky).remote(2, ValueError, LoadedBy())
    assert looks
    assert get(ref) == (3, 0)
    assert set(LoadedBy.threads) == {"conveyor-retries"}


# Other calls, which wait for its result.


@conveyor.remote
class Later:
    """What it does takes a while, and fails so many times first."""

    def __init__(self):
        self.tries = 0

    async def work(self, failures):
        await asyncio.sleep(0.02)
        self.tries += 1
        if self.tries <= failures:
            raise ValueError(f"at try {self.tries}")
        return self.tries

    async def pass_on(self, value):
        return value


def test_calls_that_lack_its_result_do_not_hold_up_the_next_try(engine):
    """Directly, and by way of another actor."""
    here, there = Later.remote(), Later.remote()
    options = {"max_task_retries": 3, "retry_exceptions": True}
    assert get(here.pass_on.remote(here.work.options(**options).remote(2))) == 3
    first = there.work.options(**options).remote(2)
    assert get(there.pass_on.remote(here.pass_on.remote(first))) == 3


def held(holder):
    """The end of a channel, and the result of a call of ``holder``, which lasts until something is sent."""
    opens, gate = channel.open()
    return opens, holder.__ray_call__.remote(lambda self, gate: gate.receive(timeout=WAIT), gate)


def test_what_waits_for_it_in_turn_can_say_for_what(local):
    flaky, holder = Flaky.remote(), Flaky.remote()
    opens, opened = held(holder)
    waits = flaky.work.remote(0, ValueError, with_retries(flaky).remote(2, ValueError, opened))
    with pytest.raises(WaitTimeoutError, match=r"calls for Flaky wait for Flaky#2.__ray_call__"):
        conveyor.get(waits, timeout=0.1)
    opens.send(1)
    assert get(waits) == (1, 4)
    opens, opened = held(holder)
    waits = holder.work.remote(0, ValueError, with_retries(holder).remote(0))
    with pytest.raises(WaitTimeoutError, match=r"calls for Flaky#2 wait for Flaky#2.work \(call"):
        conveyor.get(waits, timeout=0.1)
    opens.send(1)
    assert get([opened, waits]) == [1, (1, 1)]


def test_who_waits_for_it_hears_of_others_that_have_failed(local):
    flaky, holder, fails = Flaky.remote(), Flaky.remote(), Flaky.remote()
    opens, opened = held(holder)
    one = with_retries(flaky).remote(0, ValueError, opened)
    two = flaky.work.options(num_returns=2, max_task_retries=1).remote(0)
    for refs in ([one, fails.work.remote(2)], [*two, fails.work.remote(2)]):
        with pytest.raises(ValueError, match="at try"):
            get(refs)
        assert not any(ref.done() for ref in refs[:-1])
    opens.send(1)
    assert get([one, *two]) == [(1, 1), 1, 0]


def test_arguments_by_name_keep_their_order(engine):
    actor = Flaky.remote()
    value = actor.work.remote(0)
    _, named = get(actor.given.remote(1, first=1, second=value, third=[1], fourth=value))
    assert list(named) == ["first", "second", "third", "fourth"]
