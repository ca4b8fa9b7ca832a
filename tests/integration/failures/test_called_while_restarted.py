"""Calls of an actor whose first process, or its next one, takes long to be placed: they wait where any call
of it waits."""

import asyncio
import gc
import logging
import os
import re
import signal
import threading

import pytest

import conveyor
from conveyor.command.status import find_sessions
from conveyor.dag import InputNode
from conveyor.driver import supervisor
from conveyor.exceptions import (
    ActorDiedError,
    ActorStartError,
    DeadlineExceededError,
    DeadlockError,
    WaitTimeoutError,
)
from conveyor.flag import Flag
from conveyor.runtime import context

WAIT = 60


@conveyor.remote(max_restarts=-1)
class Stage:
    def pid(self):
        return os.getpid()

    def same(self, value):
        return value


@conveyor.remote
class Log:
    def __init__(self):
        self.noted = []

    def note(self, value):
        self.noted.append(value)
        return list(self.noted)

    def same(self, value):
        return value


class Placing:
    """Where processes are placed. ``begun``: somebody has asked for a place; ``over``: there is one."""

    def __init__(self, monkeypatch):
        hosts = context.running()._engine
        self.begun, self.over, self._place = threading.Event(), threading.Event(), hosts.spawn
        self.refused = False
        monkeypatch.setattr(hosts, "spawn", self._spawn)

    def _spawn(self, *args):
        self.begun.set()
        assert self.over.wait(WAIT)
        if self.refused:
            raise ActorStartError("there is no place for it")
        return self._place(*args)


def strike(stage, monkeypatch):
    """Have the actor die. Its next process is placed when the test says so."""
    pid = conveyor.get(stage.pid.remote(), timeout=WAIT)
    placing = Placing(monkeypatch)
    os.kill(pid, signal.SIGKILL)
    assert placing.begun.wait(WAIT)
    return placing


@pytest.fixture
def struck(fresh_session, monkeypatch):
    """An actor that has died, and is on its way back."""
    stage = Stage.remote()
    placing = strike(stage, monkeypatch)
    yield stage, placing
    placing.over.set()


def test_they_are_queued(struck):
    stage, placing = struck
    refs = [stage.same.remote(i) for i in range(200)]  # more than a ring takes
    with pytest.raises(WaitTimeoutError, match=r"Stage\.same \(call 1\); Stage is starting"):
        conveyor.get(refs[0], timeout=0.01)
    assert not refs[0].done()
    placing.over.set()
    assert conveyor.get(refs, timeout=WAIT) == list(range(200))


def test_they_fail_if_it_does_not_come_back(struck):
    stage, placing = struck
    ref = stage.same.remote(1)
    placing.refused = True
    placing.over.set()
    with pytest.raises(
        ActorDiedError, match="could not be started again: there is no place for it"
    ):
        conveyor.get(ref, timeout=WAIT)
    with pytest.raises(
        ActorDiedError, match="could not be started again: there is no place for it"
    ):
        conveyor.get(stage.same.remote(1), timeout=WAIT)


def test_they_are_done_though_its_last_handle_is_gone(fresh_session, monkeypatch, wait_until):
    stage = Stage.remote()
    placing = strike(stage, monkeypatch)
    refs, pid = [stage.same.remote(i) for i in range(200)], stage.pid.remote()
    del stage
    gc.collect()
    context.running().cleanup.do()
    placing.over.set()
    assert conveyor.get(refs, timeout=WAIT) == list(range(200))
    # Then it ends.
    last = conveyor.get(pid, timeout=WAIT)
    wait_until(lambda: not os.path.exists(f"/proc/{last}"), WAIT)


def test_the_session_may_end_meanwhile(struck, wait_until):
    (stage, placing), table = struck, context.running().table
    ref = stage.same.remote(1)
    ender = threading.Thread(target=conveyor.shutdown)
    ender.start()
    wait_until(lambda: table.closed, WAIT)  # else it might come back before
    placing.over.set()
    ender.join(WAIT)
    assert not ender.is_alive()
    with pytest.raises(conveyor.exceptions.ConveyorError):
        conveyor.get(ref, timeout=WAIT)


def graph_of(stage):
    with InputNode() as inp:
        return stage.same.bind(inp).compile()


@pytest.fixture
def struck_graph(fresh_session, monkeypatch):
    """A graph whose actor has died, and is on its way back."""
    stage = Stage.remote()
    graph = graph_of(stage)
    assert conveyor.get(graph.execute(0), timeout=WAIT) == 0
    placing = strike(stage, monkeypatch)
    yield graph, placing
    placing.over.set()


def test_an_execution_waits_for_it_as_long_as_it_may(struck_graph):
    graph, placing = struck_graph
    with pytest.raises(WaitTimeoutError, match=r"after 0\.05 s waiting for the restart of Stage"):
        graph.execute(1, timeout=0.05)
    late = r"deadline of 0\.05 s has passed before it could begin: .* restart of Stage"
    with pytest.raises(DeadlineExceededError, match=late):
        graph.execute(1, deadline=0.05)
    with pytest.raises(DeadlineExceededError, match=late):
        graph.execute(1, timeout=WAIT, deadline=0.05)
    with pytest.raises(DeadlineExceededError, match=late):
        graph.try_execute(1, deadline=0.05)
    with pytest.raises(DeadlineExceededError, match=late):
        asyncio.run(graph.execute_async(1, deadline=0.05))
    placing.over.set()
    assert conveyor.get(graph.execute(1, timeout=WAIT), timeout=WAIT) == 1


def test_an_execution_waits_for_another_threads_restart_as_long_as_it_may(
    struck_graph, monkeypatch
):
    graph, placing = struck_graph
    waits, wait = threading.Event(), supervisor.wait_for_flag

    def waiting(*args):
        waits.set()
        wait(*args)

    monkeypatch.setattr(supervisor, "wait_for_flag", waiting)
    thread = threading.Thread(target=graph.restart)
    thread.start()
    try:
        assert waits.wait(WAIT)
        with pytest.raises(WaitTimeoutError, match=r"the restart of .*; another thread does it"):
            graph.execute(1, timeout=0.05)
    finally:
        placing.over.set()
        thread.join(WAIT)
    assert conveyor.get(graph.execute(1), timeout=WAIT) == 1


def test_a_signal_handler_cannot_execute_the_graph_that_is_restarted(struck_graph, monkeypatch):
    """It would wait for what it has interrupted."""
    graph, placing = struck_graph
    raised, wait = [], supervisor.wait_for_flag

    def handler(*_):
        try:
            graph.execute(2, timeout=WAIT)
        except DeadlockError as error:
            raised.append(str(error))
        placing.over.set()

    def interrupted(*args):
        if not raised:
            signal.raise_signal(signal.SIGALRM)
        wait(*args)

    monkeypatch.setattr(supervisor, "wait_for_flag", interrupted)
    before = signal.signal(signal.SIGALRM, handler)
    try:
        graph.restart()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert "being restarted by this very thread" in raised[0]
    assert conveyor.get(graph.execute(1), timeout=WAIT) == 1


@conveyor.remote
class Executes:
    """A graph of its own, of an actor that it is given."""

    def compile(self, stage):
        self.graph = graph_of(stage)
        return conveyor.get(self.graph.execute(0))

    def execute(self, value, **options):
        return conveyor.get(self.graph.execute(value, **options))


def test_nor_does_an_execution_of_another_actor_wait_longer(fresh_session, monkeypatch):
    stage, executes = Stage.remote(), Executes.remote()
    assert conveyor.get(executes.compile.remote(stage), timeout=WAIT) == 0
    placing = strike(stage, monkeypatch)
    try:
        with pytest.raises(
            WaitTimeoutError, match=r"after 0\.05 s waiting for the restart of Stage"
        ):
            conveyor.get(executes.execute.remote(1, timeout=0.05), timeout=WAIT)
        with pytest.raises(DeadlineExceededError, match="before it could begin"):
            conveyor.get(executes.execute.remote(1, deadline=0.05), timeout=WAIT)
    finally:
        placing.over.set()
    assert conveyor.get(executes.execute.remote(1, timeout=WAIT), timeout=WAIT) == 1


@conveyor.remote(max_concurrency=2)
class Calls:
    def call(self, stage, value):
        return conveyor.get(stage.same.remote(value))


def test_an_actor_calls_others_meanwhile(fresh_session, monkeypatch):
    stage, other, calls = Stage.remote(), Stage.remote(), Calls.remote()
    pid = conveyor.get(stage.pid.remote(), timeout=WAIT)
    conveyor.get([other.pid.remote(), calls.call.remote(Stage.remote(), 0)], timeout=WAIT)
    waits, wait = threading.Event(), supervisor.wait_for_flag

    def waiting(*args):
        waits.set()
        wait(*args)

    placing = Placing(monkeypatch)
    monkeypatch.setattr(context.running()._engine, "places", True)  # so the link waits for that
    try:
        os.kill(pid, signal.SIGKILL)
        assert placing.begun.wait(WAIT)
        monkeypatch.setattr(supervisor, "wait_for_flag", waiting)
        ref = calls.call.remote(stage, 1)
        assert waits.wait(WAIT)
        assert conveyor.get(calls.call.remote(other, 2), timeout=WAIT) == 2
        assert not ref.done()
    finally:
        placing.over.set()
    assert conveyor.get(ref, timeout=WAIT) == 1


@conveyor.remote
class Fronts:
    """An actor that serves several callers at a time."""

    async def call(self, stage, value, seconds=None):
        return await asyncio.wait_for(stage.same.remote(value), seconds)

    async def serve(self):
        return "served"


@conveyor.remote
class Asks:
    def call(self, stage, value, seconds=None):
        return conveyor.get(stage.same.remote(value), timeout=seconds)


@pytest.fixture
def called(fresh_session, monkeypatch):
    """Actors that have called one that has died, and is on its way back."""
    stage, fronts, asks = Stage.remote(), Fronts.remote(), Asks.remote()
    conveyor.get([fronts.call.remote(stage, 0), asks.call.remote(stage, 0)], timeout=WAIT)
    placing = strike(stage, monkeypatch)
    yield stage, fronts, asks, placing
    placing.over.set()


def test_calls_of_other_actors_are_queued_as_well(called):
    stage, fronts, asks, placing = called
    ref = fronts.call.remote(stage, 1)
    with pytest.raises(TimeoutError):
        conveyor.get(fronts.call.remote(stage, 2, 0.05), timeout=WAIT)
    assert conveyor.get(fronts.serve.remote(), timeout=WAIT) == "served"
    with pytest.raises(WaitTimeoutError, match=r"Stage\.same \(call 0\); Stage is starting"):
        conveyor.get(asks.call.remote(stage, 3, 0.05), timeout=WAIT)
    assert not ref.done()
    placing.over.set()
    assert conveyor.get(ref, timeout=WAIT) == 1
    assert conveyor.get(asks.call.remote(stage, 4), timeout=WAIT) == 4


def test_they_fail_too_if_it_does_not_come_back(called, wait_until):
    stage, fronts, asks, placing = called
    refs = [fronts.call.remote(stage, 1), asks.call.remote(stage, 1)]
    callers = [context.running().table.record(one._id) for one in (fronts, asks)]
    wait_until(lambda: all(one.mailboxes for one in callers), WAIT)
    placing.refused = True
    placing.over.set()
    for ref in (*refs, asks.call.remote(stage, 1)):
        with pytest.raises(
            ActorDiedError, match="could not be started again: there is no place for it"
        ):
            conveyor.get(ref, timeout=WAIT)
    assert not any(one.mailboxes for one in callers)


class Pause(Flag):
    """The one before an actor is started again whose constructor has killed it."""

    def __init__(self):
        super().__init__()
        self.begun, self.over = threading.Event(), threading.Event()

    def wait(self, timeout=None):
        self.begun.set()
        assert self.over.wait(WAIT)
        return False


@conveyor.remote(max_restarts=-1)
class Fragile(Stage):
    def __init__(self, path):
        if os.path.exists(path):
            os._exit(1)


def test_they_are_queued_before_the_next_try(fresh_session, monkeypatch, tmp_path):
    path = tmp_path / "dies"
    fragile, asks = Fragile.remote(str(path)), Asks.remote()
    conveyor.get(asks.call.remote(fragile, 0), timeout=WAIT)
    pid = conveyor.get(fragile.pid.remote(), timeout=WAIT)
    pause = Pause()
    actor = context.running().table.record(fragile._id).actor
    monkeypatch.setattr(actor, "over", pause)
    try:
        path.touch()
        os.kill(pid, signal.SIGKILL)
        assert pause.begun.wait(WAIT)
        path.unlink()
        ref = fragile.same.remote(1)
        with pytest.raises(WaitTimeoutError, match="Fragile is starting"):
            conveyor.get(ref, timeout=0.01)
        with pytest.raises(WaitTimeoutError, match="Fragile is starting"):
            conveyor.get(asks.call.remote(fragile, 2, 0.01), timeout=WAIT / 2)
    finally:
        pause.over.set()
    assert conveyor.get(ref, timeout=WAIT) == 1


@pytest.fixture
def pausing(fresh_session, monkeypatch, tmp_path, wait_until):
    """An actor whose next try is far away, and its record."""
    monkeypatch.setattr(supervisor, "_FIRST_DELAY", 10 * WAIT)
    monkeypatch.setattr(supervisor, "_LONGEST_DELAY", 10 * WAIT)
    path = tmp_path / "dies"
    fragile = Fragile.remote(str(path))
    pid = conveyor.get(fragile.pid.remote(), timeout=WAIT)
    path.touch()
    os.kill(pid, signal.SIGKILL)
    record = context.running().table.record

    def waits():
        dead = record(fragile._id)
        return dead.actor.failures and dead.successor is not None

    wait_until(waits, WAIT)
    return [fragile], record(fragile._id)


def test_a_kill_before_the_next_try_ends_it_at_once(pausing, wait_until):
    (fragile,), record = pausing
    asks, table = Asks.remote(), context.running().table
    refs = [fragile.same.remote(1), asks.call.remote(fragile, 1)]
    caller = table.record(asks._id)
    wait_until(lambda: caller.mailboxes, WAIT)
    free = table.free_slots
    conveyor.kill(fragile)
    for ref in refs:
        with pytest.raises(ActorDiedError, match=r"Fragile was killed by conveyor\.kill\(\)"):
            conveyor.get(ref, timeout=WAIT)
    why = r"Fragile .* exited with code 1 .*; it could not be started again: conveyor\.kill\(\) has ended it"
    for call in (lambda: fragile.same.remote(2), lambda: asks.call.remote(fragile, 2)):
        with pytest.raises(ActorDiedError, match=why):
            conveyor.get(call(), timeout=WAIT)
    assert table.free_slots == free + 1
    assert not caller.mailboxes
    assert record.actor.constructor is None


def test_nothing_is_kept_of_one_that_was_killed_before_the_next_try(pausing):
    left, record = pausing
    free = context.running().table.free_slots
    conveyor.kill(left[0])
    assert record.replaced.wait(WAIT)
    left.clear()
    gc.collect()
    context.running().cleanup.do()
    # How it ended is remembered, as of the last of all dead actors.
    assert record.actor.constructor is None
    assert context.running().table.free_slots == free + 1


def test_nor_of_one_whose_last_handle_was_gone_before_it_was_known_not_to_come_back(
    fresh_session, monkeypatch, wait_until
):
    stage = Stage.remote()
    placing = strike(stage, monkeypatch)
    record = context.running().table.known(stage._id)
    del stage
    gc.collect()
    context.running().cleanup.do()
    placing.refused = True
    placing.over.set()
    wait_until(lambda: record.actor.constructor is None, WAIT)


def test_the_session_may_end_before_the_next_try(pausing):
    (fragile,), _ = pausing
    ref = fragile.same.remote(1)
    ender = threading.Thread(target=conveyor.shutdown)
    ender.start()
    ender.join(WAIT)
    assert not ender.is_alive()
    with pytest.raises(conveyor.exceptions.ConveyorError):
        conveyor.get(ref, timeout=WAIT)


def said_of(name):
    """What ``conveyor status`` says of an actor of this program's session."""
    (session,) = find_sessions(os.getpid())
    return [one.status.describe() for one in session.processes if one.status.name.startswith(name)]


@conveyor.remote
class Waits:
    """An actor that calls another one, and executes a graph with it."""

    def compile(self, stage):
        self.graph = graph_of(stage)
        return conveyor.get(self.graph.execute(0))

    def call(self, stage, value):
        return conveyor.get(stage.same.remote(value))

    def execute(self, _stage, value):
        return conveyor.get(self.graph.execute(value))


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("call", "the driver, for a way to call Stage"),
        ("execute", "the driver, which brings graph [0-9]+ back"),
    ],
)
def test_status_says_what_an_actor_waits_for(fresh_session, monkeypatch, wait_until, how, what):
    stage, waits = Stage.remote(), Waits.remote()
    assert conveyor.get(waits.compile.remote(stage), timeout=WAIT) == 0
    placing = strike(stage, monkeypatch)
    monkeypatch.setattr(context.running()._engine, "places", True)
    try:
        ref = getattr(waits, how).remote(stage, 1)
        said = rf"running {how} .*, which waits for {what}"
        wait_until(lambda: any(re.search(said, one) for one in said_of("Waits")), WAIT)
    finally:
        placing.over.set()
    assert conveyor.get(ref, timeout=WAIT) == 1
    wait_until(lambda: "waits" not in said_of("Waits")[0], WAIT)


class Later(Placing):
    """Hosts that are asked for a process, and have a place for it when the test says so."""

    def _spawn(self, *args):
        return Wish(self, args)


class Wish:
    def __init__(self, placing, args):
        self.placing, self.args = placing, args

    def ask(self):
        self.placing.begun.set()
        return False

    def wait(self):
        assert self.placing.over.wait(WAIT)
        if self.placing.refused:
            raise ActorStartError("cannot start actor 'Stage': there is no place for it")
        placed = self.placing._place(*self.args)
        placed.ask()
        return placed.wait()

    def give_up(self, why):
        self.placing.refused = why
        self.placing.over.set()


@pytest.fixture
def placing(fresh_session, monkeypatch):
    """Actors that are started from now on are placed when the test says so."""
    later = Later(monkeypatch)
    yield later
    later.over.set()


def test_an_actor_that_has_no_place_yet_is_called_and_does_it_in_order(placing):
    stage = Log.options(name="first").remote()
    assert placing.begun.is_set()
    refs = [stage.note.remote(i) for i in range(200)]  # more than a ring takes
    same = Log.options(name="first", get_if_exists=True).remote()
    assert same == stage == conveyor.get_actor("first")
    with pytest.raises(ValueError, match="there is an actor named 'first' already"):
        Log.options(name="first").remote()
    with pytest.raises(WaitTimeoutError, match=r"first\.note \(call 1\); first is starting"):
        conveyor.get(refs[0], timeout=0.01)
    compiled = []

    def compile():
        with InputNode() as inp:
            compiled.append(stage.same.bind(inp).compile())

    compiling = threading.Thread(target=compile)
    compiling.start()
    placing.over.set()
    assert conveyor.get(refs, timeout=WAIT) == [list(range(i + 1)) for i in range(200)]
    compiling.join(WAIT)
    assert conveyor.get(compiled[0].execute(7), timeout=WAIT) == 7


def test_the_last_handle_of_one_that_has_no_place_yet_loses_no_call(placing):
    ref = Log.remote().same.remote(3)
    gc.collect()
    placing.over.set()
    assert conveyor.get(ref, timeout=WAIT) == 3


def test_a_start_that_fails_is_the_error_of_each_call(placing, caplog):
    stage = Stage.options(name="first").remote()
    ref = stage.pid.remote()
    placing.refused = True
    placing.over.set()
    with caplog.at_level(logging.WARNING, "conveyor"):
        for ask in (
            lambda: conveyor.get(ref, timeout=WAIT),
            lambda: conveyor.get(stage.same.remote(1), timeout=WAIT),
            lambda: asyncio.run(awaited(stage)),
            lambda: stage.same.bind(InputNode()).compile(),
        ):
            with pytest.raises(ActorStartError, match="start actor 'Stage': there is no place"):
                ask()
        placing.refused = False
        other = Stage.options(name="first").remote()  # the name is free
        assert conveyor.get(other.same.remote(1), timeout=WAIT) == 1
        stage = ref = None
        gc.collect()
        conveyor.shutdown()
    assert "there is no place" not in caplog.text  # somebody was told


async def awaited(stage):
    return await stage.same.remote(1)


@pytest.mark.parametrize("dropped", ["before", "after", "never"])
def test_a_start_that_fails_and_that_nobody_asks_for_is_logged_once(
    placing, caplog, wait_until, dropped
):
    with caplog.at_level(logging.WARNING, "conveyor"):
        stage = Stage.remote()
        record = context.running().table.record(stage._id)
        if dropped == "before":
            del stage
            wait_until(lambda: record.actor.handles == 0)
        placing.refused = True
        placing.over.set()
        assert record.placed.wait(WAIT)
        if dropped == "after":
            del stage
        if dropped != "never":
            wait_until(lambda: "there is no place for it" in caplog.text)
        conveyor.shutdown()
    assert caplog.text.count("there is no place for it") == 1


@pytest.mark.parametrize("graceful", [False, True])
def test_one_that_has_no_place_yet_can_be_killed(placing, graceful):
    stage = Stage.options(name="first").remote()
    ref = stage.pid.remote()
    conveyor.kill(stage, graceful=graceful)
    assert placing.refused  # nobody waits for a place any more
    for ask in (ref, lambda: stage.same.remote(1)):
        with pytest.raises(
            ActorDiedError, match=r"actor first was (killed|ended) by conveyor\.kill"
        ):
            conveyor.get(ask() if callable(ask) else ask, timeout=WAIT)
