"""Actors and graphs that come back after a death, through the public API."""

import asyncio
import gc
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import cloudpickle
import numpy as np
import psutil
import pytest
from integration_helpers import WAIT, chain, get, hold

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.driver import supervisor as restart
from conveyor.driver.supervisor import DeathCleanup, Restarts, Step
from conveyor.exceptions import ActorDiedError, ActorRestartedError, GraphTornDownError
from conveyor.runtime import context

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.usefixtures("session")


@conveyor.remote
class Counter:
    def __init__(self, start=0, *, weights=None, log=None):
        self.value = start
        self.weights = weights
        if log is not None:
            with open(log, "a") as file:
                file.write(f"{os.getpid()}\n")

    def add(self, n):
        self.value += n
        return self.value

    def echo(self, x):
        return x

    def total(self):
        self.weights += 0  # its own, to be written to
        return self.weights.sum()

    def pid(self):
        return os.getpid()

    def end(self, how):
        if how == "leave":
            sys.exit(0)
        if how == "code":
            sys.exit(7)
        os.kill(os.getpid(), signal.SIGKILL)

    def hold(self, inside, go):
        open(inside, "w").close()
        hold(go)
        return "held"

    def ask(self, other):
        return conveyor.get(other.add.remote(1))


@conveyor.remote
class Unlucky:
    """Its constructor kills the process the first times."""

    def __init__(self, log, deaths):
        with open(log, "a") as file:
            file.write("x")
        if os.path.getsize(log) <= deaths:
            os._exit(9)

    def echo(self, x):
        return x


def retry(call):
    """What a user does: try again as long as the error says so."""
    while True:
        try:
            return get(call())
        except ActorRestartedError:
            pass


def kill(actor):
    """Kill the actor's process from outside, and wait until it has a new one or none."""
    os.kill(get(actor.pid.remote()), signal.SIGKILL)


def use(graph):
    """Executions until one fails: that an idle actor has died is only known by using it."""
    for _ in range(3):
        get(graph.execute(1))


def lives(actor):
    try:
        return get(actor.echo.remote(True))
    except ActorDiedError:
        return False


# max_restarts


@pytest.mark.parametrize("how", ["kill", "code"])
def test_an_actor_comes_back_with_its_constructor(how):
    actor = Counter.options(max_restarts=1).remote(10, weights=np.ones(1000))
    before = get(actor.pid.remote())
    assert get(actor.add.remote(5)) == 15
    with pytest.raises(ActorRestartedError, match="can be tried again"):
        get(actor.end.remote(how))
    assert get(actor.add.remote(5)) == 15
    assert get(actor.total.remote()) == 1000
    assert get(actor.pid.remote()) != before
    # And no more than once.
    with pytest.raises(ActorDiedError) as caught:
        get(actor.end.remote(how))
    assert type(caught.value) is ActorDiedError
    with pytest.raises(ActorDiedError):
        get(actor.echo.remote(1))


def test_an_actor_that_leaves_with_code_0_stays_away():
    actor = Counter.options(max_restarts=-1).remote()
    with pytest.raises(ActorDiedError) as caught:
        get(actor.end.remote("leave"))
    assert caught.value.exit_code == 0
    with pytest.raises(ActorDiedError) as caught:
        get(actor.echo.remote(1))
    assert type(caught.value) is ActorDiedError


def test_a_killed_actor_stays_dead():
    actor = Counter.options(max_restarts=-1).remote()
    get(actor.echo.remote(1))
    conveyor.kill(actor)
    for _ in range(2):
        with pytest.raises(ActorDiedError, match="kill") as caught:
            get(actor.echo.remote(1))
        assert type(caught.value) is ActorDiedError


def test_arguments_are_those_that_were_sent():
    start = np.ones(200_000)  # more than is kept of an actor without max_restarts
    actor = Counter.options(max_restarts=-1).remote(weights=start)
    start[:] = 7
    assert get(actor.total.remote()) == 200_000
    kill(actor)
    assert retry(actor.total.remote) == 200_000


def test_arguments_may_be_refs():
    maker = Counter.remote()
    actor = Counter.options(max_restarts=-1).remote(
        maker.add.remote(5), weights=maker.echo.remote(1)
    )
    assert get(actor.add.remote(1)) == 6
    kill(actor)
    assert retry(lambda: actor.add.remote(1)) == 6


def test_named_actors_keep_their_names():
    actor = Counter.options(max_restarts=-1, name="phoenix").remote()
    kill(actor)
    again = conveyor.get_actor("phoenix")
    assert again == actor
    assert retry(lambda: again.echo.remote(3)) == 3
    with pytest.raises(ValueError, match="phoenix"):
        Counter.options(name="phoenix").remote()
    conveyor.kill(actor)


def test_handles_of_other_actors_reach_the_new_process():
    actor = Counter.options(max_restarts=-1).remote()
    other = Counter.remote()
    assert get(other.ask.remote(actor)) == 1
    for _ in range(3):
        kill(actor)
        assert retry(lambda: other.ask.remote(actor)) == 1
    assert get(other.ask.remote(actor)) == 2


def test_an_actor_that_waits_is_told_that_it_may_try_again(latches):
    class Asker:
        def ask(self, handle, inside):
            try:
                conveyor.get(handle.hold.remote(inside, "/nonexistent"))
            except ActorRestartedError:
                return conveyor.get(handle.echo.remote("again"))

    inside = latches()
    actor = Counter.options(max_restarts=1).remote()
    pid = get(actor.pid.remote())
    asker = conveyor.remote(Asker).remote()
    ref = asker.ask.remote(actor, inside.path)
    hold(inside.path)
    os.kill(pid, signal.SIGKILL)
    assert get(ref) == "again"


def test_actors_of_actors_come_back():
    class Maker:
        def make(self, start):
            self.made = Counter.options(max_restarts=-1).remote(start)
            return self.made

        def value(self):
            return conveyor.get(self.made.add.remote(0))

    maker = conveyor.remote(Maker).remote()
    made = get(maker.make.remote(5))
    assert get(made.add.remote(1)) == 6
    kill(made)
    assert retry(lambda: made.add.remote(1)) == 6
    assert get(maker.value.remote()) == 6


def test_calls_in_flight_fail_and_later_ones_do_not(latches):
    inside = latches()
    actor = Counter.options(max_restarts=1).remote()
    pid = get(actor.pid.remote())
    refs = [
        actor.hold.remote(inside.path, "/nonexistent"),
        *(actor.add.remote(1) for _ in range(3)),
    ]
    hold(inside.path)
    os.kill(pid, signal.SIGKILL)
    for ref in refs:
        with pytest.raises(ActorRestartedError):
            get(ref)
    assert get(actor.add.remote(1)) == 1


def test_an_actor_that_dies_in_its_constructor_is_tried_again(tmp_path):
    log = str(tmp_path / "log")
    actor = Unlucky.options(max_restarts=3).remote(log, 2)
    assert retry(lambda: actor.echo.remote(1)) == 1
    assert os.path.getsize(log) == 3
    log = str(tmp_path / "log2")
    actor = Unlucky.options(max_restarts=1).remote(log, 9)
    with pytest.raises(ActorDiedError, match="code 9"):
        retry(lambda: actor.echo.remote(1))
    assert os.path.getsize(log) == 2


def test_options():
    for value in (1.5, "1", None, True):
        with pytest.raises(TypeError, match="max_restarts"):
            Counter.options(max_restarts=value)
    with pytest.raises(ValueError, match="max_restarts"):
        Counter.options(max_restarts=-2)


def test_the_last_handle_of_an_actor_on_its_way_back(wait_until):
    actor = Counter.options(max_restarts=-1).remote()
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    pid = get(actor.pid.remote())
    os.kill(pid, signal.SIGKILL)
    del actor
    wait_until(
        lambda: {p.pid for p in psutil.Process().children(recursive=True)} <= before - {pid},
        what="nobody in its place",
    )


# graph.restart()


def test_a_graph_restarts_in_place():
    a, b = Counter.remote(), Counter.remote(100)
    with chain(a.add, b.add).compile(name="phoenix") as graph:
        assert [get(graph.execute(1)) for _ in range(3)] == [101, 103, 106]
        arrived = graph.execute(0)
        conveyor.wait([arrived], timeout=WAIT)
        kill(b)
        with pytest.raises(ActorDiedError) as caught:
            use(graph)
        assert type(caught.value) is ActorDiedError
        with pytest.raises(ActorDiedError):
            graph.execute(1)
        graph.restart()
        # The survivor is as it was, the other new.
        value = get(a.add.remote(0))
        assert get(graph.execute(1)) == 100 + value + 1
        assert get(arrived) == 109  # what had come before
        assert get(b.add.remote(0)) == 100 + value + 1


def test_executions_in_flight_can_be_tried_again(latches):
    inside, go = latches(), latches()
    a, b = Counter.remote(), Counter.remote()
    pid = get(b.pid.remote())
    with InputNode() as inp:
        dag = MultiOutputNode([a.echo.bind(inp), b.hold.bind(a.echo.bind(inp), go.path)])
    with dag.compile(fail_fast=False) as graph:
        refs = [graph.execute(inside.path) for _ in range(4)]
        hold(inside.path)
        conveyor.wait([outs[0] for outs in refs], num_returns=4, timeout=WAIT)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ActorDiedError, match="SIGKILL"):
            get(refs[0][1])
        graph.restart()
        go.open()
        new = graph.execute(inside.path)
        assert get(new) == [inside.path, "held"]
        for first, second in refs:
            assert get(first) == inside.path  # it had arrived
            if second is not refs[0][1]:
                with pytest.raises(ActorRestartedError, match="restarted since") as caught:
                    get(second)
                assert "SIGKILL" in str(caught.value)
        assert "execution 4" in repr(new[0])  # numbers go on


def test_a_waiter_is_told_though_the_graph_is_restarted_at_once(latches):
    inside = latches()
    b = Counter.remote()
    pid = get(b.pid.remote())
    with InputNode() as inp:
        dag = b.hold.bind(inp, "/nonexistent")
    with dag.compile() as graph:
        refs = [graph.execute(inside.path) for _ in range(3)]
        told = []

        def wait(ref):
            try:
                get(ref)
            except ActorDiedError as error:
                told.append(error)

        threads = [threading.Thread(target=wait, args=(ref,)) for ref in refs]
        for thread in threads:
            thread.start()
        hold(inside.path)
        os.kill(pid, signal.SIGKILL)
        while not told:
            time.sleep(0.001)
        graph.restart()
        for thread in threads:
            thread.join(WAIT)
        assert len(told) == 3


def test_restart_of_a_healthy_graph_changes_nothing():
    a = Counter.remote()
    with chain(a.add).compile() as graph:
        ref = graph.execute(1)
        graph.restart()
        assert [get(ref), get(graph.execute(1))] == [1, 2]
    with pytest.raises(GraphTornDownError):
        graph.restart()


def test_a_graph_whose_actors_come_back_restarts_itself():
    a, b = Counter.remote(), Counter.options(max_restarts=-1).remote()
    with chain(a.echo, b.add).compile() as graph:
        for _ in range(3):
            assert get(graph.execute(1)) == 1
            assert get(graph.execute(1)) == 2
            kill(b)
            with suppress(ActorRestartedError):  # unless its death is known by then
                get(graph.execute(0))
        assert get(graph.try_execute(1)) == 1


def test_execute_async_restarts_the_graph():
    b = Counter.options(max_restarts=-1).remote()

    async def run():
        with chain(b.add).compile() as graph:
            assert await (await graph.execute_async(1)) == 1
            os.kill(get(b.pid.remote()), signal.SIGKILL)
            with suppress(ActorRestartedError):  # unless its death is known by then
                get(graph.execute(0))
            return await (await graph.execute_async(1))

    assert asyncio.run(run()) == 1


def test_two_graphs_share_the_dead_actor():
    a, b = Counter.remote(), Counter.remote()
    with chain(a.echo, b.add).compile() as one, chain(b.add).compile() as two:
        assert [get(one.execute(1)), get(two.execute(1))] == [1, 2]
        kill(b)
        for graph in (one, two):
            with pytest.raises(ActorDiedError):
                use(graph)
        one.restart()
        assert get(one.execute(1)) == 1
        pid = get(b.pid.remote())
        two.restart()
        assert get(two.execute(1)) == 2
        assert get(b.pid.remote()) == pid  # brought back once


def test_several_dead_actors_come_back():
    actors = [Counter.remote(i) for i in range(4)]
    with chain(*(x.add for x in actors)).compile() as graph:
        assert get(graph.execute(0)) == 6
        for x in actors[1:]:
            kill(x)
        with pytest.raises(ActorDiedError):
            use(graph)
        graph.restart()
        assert get(graph.execute(0)) - get(actors[0].add.remote(0)) == 1 + 2 + 3


def test_one_whose_death_is_not_known_yet_comes_back_with_the_others(monkeypatch, wait_until):
    a, b = Counter.remote(), Counter.remote()
    with chain(a.echo, b.echo).compile() as graph:
        pid = get(a.pid.remote())
        kill(b)
        with pytest.raises(ActorDiedError):
            use(graph)
        supervisor = context.current().supervisor
        revive = supervisor.revive

        def revive_and_kill(actor, time_limit):
            record = revive(actor, time_limit)
            if record.pid == pid:
                os.kill(pid, signal.SIGKILL)
                wait_until(lambda: not record.alive)
            return record

        monkeypatch.setattr(supervisor, "revive", revive_and_kill)
        graph.restart()
        assert get(graph.execute(1)) == 1


def test_what_cannot_be_brought_back():
    big = Counter.remote(weights=np.ones(500_000))
    killed = Counter.remote()
    with chain(big.echo).compile() as graph:
        kill(big)
        with pytest.raises(ActorDiedError):
            use(graph)
        with pytest.raises(ActorDiedError, match="max_restarts"):
            graph.restart()
    with chain(killed.echo).compile() as graph:
        get(graph.execute(1))
        conveyor.kill(killed)
        with pytest.raises(ActorDiedError, match=r"conveyor\.kill"):
            graph.restart()


def test_an_actor_dies_again_during_the_restart(tmp_path):
    log = str(tmp_path / "log")
    Path(log).write_text("xxxx")
    unlucky = Unlucky.remote(log, 4)
    with chain(unlucky.echo).compile() as graph:
        assert get(graph.execute(1)) == 1
        os.truncate(log, 0)
        pid = graph.status().actors[0].pid
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ActorDiedError):
            use(graph)
        for deaths in range(1, 5):
            with pytest.raises(ActorDiedError) as caught:
                graph.restart()
            assert caught.value.exit_code in (9, None)  # not known yet, on a busy machine
            assert os.path.getsize(log) == deaths
        graph.restart()
        assert get(graph.execute(2)) == 2


def test_an_actor_has_died_again_before_the_restart_looks(tmp_path, monkeypatch, wait_until):
    log = str(tmp_path / "log")
    Path(log).write_text("xx")
    unlucky = Unlucky.remote(log, 2)
    conclude = Restarts._conclude

    def conclude_late(self, record, error=None):
        again = self._table.record(record.id)
        wait_until(lambda: not again.alive or os.path.getsize(log) > 2, what="its constructor")
        conclude(self, record, error)

    monkeypatch.setattr(Restarts, "_conclude", conclude_late)
    with chain(unlucky.echo).compile() as graph:
        assert get(graph.execute(1)) == 1
        os.truncate(log, 0)
        os.kill(graph.status().actors[0].pid, signal.SIGKILL)
        with pytest.raises(ActorDiedError):
            use(graph)
        for deaths in (1, 2):
            with pytest.raises(ActorDiedError, match="code 9"):
                graph.restart()
            assert os.path.getsize(log) == deaths
        graph.restart()
        assert get(graph.execute(2)) == 2


def test_teardown_during_a_restart(latches, wait_until):
    inside, go = latches(), latches()
    a, b = Counter.remote(), Counter.remote()
    graph = chain(a.echo, b.echo).compile()
    kill(b)
    with pytest.raises(ActorDiedError):
        use(graph)
    busy = a.hold.remote(inside.path, go.path)
    hold(inside.path)
    ended = []

    def restart():
        try:
            graph.restart()
        except GraphTornDownError as error:
            ended.append(error)

    thread = threading.Thread(target=restart)
    thread.start()
    # It has started b again, and now waits for a.
    wait_until(lambda: lives(b), what="b's return")
    teardown = threading.Thread(target=graph.teardown)
    teardown.start()
    while not graph.is_teardown:
        time.sleep(0.001)
    go.open()
    thread.join(WAIT)
    teardown.join(WAIT)
    assert not thread.is_alive()
    assert not teardown.is_alive()
    assert ended
    assert get(busy) == "held"
    with chain(a.echo, b.echo).compile() as graph:
        assert get(graph.execute(1)) == 1


def test_a_restart_that_is_interrupted_can_be_made_again(latches, wait_until):
    inside, go = latches(), latches()
    a, b = Counter.remote(), Counter.remote()
    with chain(a.echo, b.add).compile() as graph:
        kill(b)
        with pytest.raises(ActorDiedError):
            use(graph)
        busy = a.hold.remote(inside.path, go.path)
        hold(inside.path)

        def interrupt():
            wait_until(lambda: lives(b), what="b's return")  # now it waits for a
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            graph.restart()
        thread.join(WAIT)
        go.open()
        with pytest.raises(ActorDiedError):
            graph.execute(1)
        graph.restart()
        assert get(graph.execute(1)) == 1
        assert get(busy) == "held"


def test_nothing_is_left_of_many_restarts(wait_until):
    a, b = Counter.remote(), Counter.options(max_restarts=-1).remote()
    other = Counter.remote()
    me = psutil.Process()

    def counts():
        gc.collect()
        pids = [get(x.pid.remote()) for x in (a, other)]
        return [
            me.num_fds(),
            len(me.children(recursive=True)),
            *(psutil.Process(pid).num_fds() for pid in pids),
        ]

    with chain(a.echo, b.add).compile() as graph:
        for i in range(40):
            assert retry(lambda: graph.execute(1)) >= 1
            assert retry(lambda: other.ask.remote(b)) >= 1
            assert retry(lambda: b.ask.remote(a)) >= 1
            if i == 4:
                before = counts()
            kill(b)
            with suppress(ActorRestartedError):  # unless its death is known by then
                get(graph.execute(0))
        assert retry(lambda: graph.execute(1)) == 1
        assert retry(lambda: other.ask.remote(b)) == 2
        assert retry(lambda: b.ask.remote(a)) >= 1
        # Actors of tests before this one may still be ending.
        wait_until(
            lambda: all(now <= then for now, then in zip(counts(), before, strict=True)),
            what=f"at most {before}; {counts()}",
        )
    # The thread of the last one ends after those who wait for it have been told.
    wait_until(
        lambda: not [t for t in threading.enumerate() if t.name == "conveyor-restart"],
        what="the end of the last restart's thread",
    )


@pytest.mark.parametrize("ready", [True, False])
def test_refs_inside_of_arguments_are_there_the_next_time_too(ready, latches):
    go = latches()

    @conveyor.remote
    class Made:
        def held(self, x, path):
            hold(path)
            return x

        def build(self, x):
            return x

    @conveyor.remote(max_restarts=1)
    class Holder:
        def __init__(self, parts):
            self.parts = parts

        def held(self):
            return {name: conveyor.get(ref) for name, ref in self.parts.items()}, os.getpid()

    maker = Made.remote()
    ref = maker.held.remote([1, 2], go.path)
    if ready:
        go.open()
        conveyor.get(ref)
    holder = Holder.remote({"rows": ref})
    if not ready:
        go.open()
    parts, pid = conveyor.get(holder.held.remote(), timeout=60)
    assert parts == {"rows": [1, 2]}
    os.kill(pid, signal.SIGKILL)
    again, other = retry(holder.held.remote)
    assert again == parts
    assert other != pid


def test_who_calls_in_the_moment_of_a_death_gets_the_next_process(monkeypatch, wait_until):
    """Between being found alive and being used."""
    counter = Counter.options(max_restarts=1).remote(5)
    pid = get(counter.pid.remote())
    supervisor = context.running().supervisor
    current = Restarts.current

    def and_dies(restarts, actor):
        found = current(restarts, actor)
        if found.pid == pid and found.alive:
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: not found.alive)
        return found

    monkeypatch.setattr(Restarts, "current", and_dies)
    assert not supervisor.link(counter._id).gone
    assert get(counter.add.remote(1)) == 6


def test_who_calls_while_the_last_restart_is_decided_on_gets_the_next_process(monkeypatch):
    counter = Counter.options(max_restarts=1).remote(5)
    pid = get(counter.pid.remote())
    decided, waits = threading.Event(), threading.Event()
    decide, wait = Restarts.decide, restart.wait_for_flag

    def decides(restarts, record):
        decide(restarts, record)
        if record.pid == pid:  # actors of tests before this one may still be ending
            decided.set()
            assert waits.wait(WAIT)

    def waiting(*args):
        waits.set()
        wait(*args)

    monkeypatch.setattr(Restarts, "decide", decides)
    monkeypatch.setattr(restart, "wait_for_flag", waiting)
    os.kill(pid, signal.SIGKILL)
    assert decided.wait(WAIT)
    try:
        assert not context.running().supervisor.link(counter._id).gone
    finally:
        waits.set()
    assert get(counter.add.remote(1)) == 6


@conveyor.remote
class Idle:
    def pid(self):
        return os.getpid()

    def step(self, x):
        return x + 1


@pytest.mark.parametrize("how", ["execute", "try_execute", "execute_async"])
@pytest.mark.parametrize("inputs", [1, 2])
def test_the_execution_after_an_idle_actors_death_is_as_any_other(how, inputs):
    idle, other = Idle.options(max_restarts=-1).remote(), Idle.remote()
    with InputNode() as inp:
        nodes = [
            other.step.bind(idle.step.bind(inp[i] if inputs > 1 else inp)) for i in range(inputs)
        ]
    with MultiOutputNode(nodes).compile() as graph:

        def run(x):
            started = getattr(graph, how)(*range(x, x + inputs))
            return get(asyncio.run(started) if how == "execute_async" else started)

        for x in range(5):
            assert run(x) == [y + 2 for y in range(x, x + inputs)]
            pid = get(idle.pid.remote())
            os.kill(pid, signal.SIGKILL)
            while pid == _pid_of(idle):  # it is known from here on
                pass
        # Deaths of others are none of its business.
        conveyor.kill(Idle.remote())
        assert run(10) == [y + 2 for y in range(10, 10 + inputs)]
        conveyor.kill(idle)
        with pytest.raises(ActorDiedError, match=r"killed by conveyor\.kill"):
            run(11)


def _pid_of(actor):
    try:
        return get(actor.pid.remote())
    except ActorDiedError:
        return None


def test_one_that_is_brought_back_while_it_is_buried_comes_back_once(monkeypatch, wait_until):
    """Its end is told before all is done that has to be done for it."""
    counter = Counter.remote()
    pid = get(counter.pid.remote())
    supervisor = context.running().supervisor
    started, revivals, start = [], [], supervisor._restarts._start
    buried = threading.Event()

    def ours(record):  # and not one that another test has let go of
        return record.id == counter._id

    def revive(record):
        if ours(record):
            thread = threading.Thread(target=supervisor.revive, args=(record.id,))
            thread.start()
            revivals.append(thread)  # once it runs: the test joins whatever it finds here
            wait_until(lambda: record.restarting)

    def note(record, pause):
        if ours(record):
            started.append(record)
        start(record, pause)

    steps = list(supervisor.death_cleanup.steps)
    steps.insert(-1, Step("a graph is restarted", revive))
    steps.append(Step("the test is told", lambda record: ours(record) and buried.set()))
    monkeypatch.setattr(supervisor, "death_cleanup", DeathCleanup(*steps))
    monkeypatch.setattr(supervisor._restarts, "_start", note)
    os.kill(pid, signal.SIGKILL)
    assert buried.wait(WAIT)  # its last step is what could start another
    revivals[0].join(WAIT)
    assert not revivals[0].is_alive()
    supervisor._restarts.join()
    monkeypatch.undo()
    assert len(started) == 1
    assert get(counter.pid.remote()) != pid


@conveyor.remote
class Device:
    """Its constructor raises as long as the file ``busy`` is there."""

    def __init__(self, busy):
        if os.path.exists(busy):
            raise OSError("the device is busy")

    def echo(self, x):
        return x

    def pid(self):
        return os.getpid()

    def compile(self, other):
        self.graph = chain(other.echo).compile()
        return conveyor.get(self.graph.execute(0))

    def restart(self, value):
        self.graph.restart()
        return conveyor.get(self.graph.execute(value))


@pytest.mark.parametrize("max_restarts", [0, -1])
@pytest.mark.parametrize("executor", ["driver", "actor"])
def test_a_constructor_that_has_raised_at_a_restart_is_run_again(tmp_path, max_restarts, executor):
    busy = tmp_path / "busy"
    device = Device.options(max_restarts=max_restarts).remote(busy)
    if executor == "actor":
        other = Device.remote(tmp_path / "none")
        assert get(other.compile.remote(device)) == 0

        def restart(value):
            return get(other.restart.remote(value))

    else:
        graph = chain(device.echo).compile()
        assert get(graph.execute(0)) == 0

        def restart(value):
            graph.restart()
            return get(graph.execute(value))

    busy.touch()
    os.kill(get(device.pid.remote()), signal.SIGKILL)
    for _ in range(3):
        with pytest.raises(ActorDiedError):  # its death, and then what its constructor raises
            restart(1)
    busy.unlink()
    # What has come back by itself may have begun before the file was gone.
    with suppress(ActorDiedError):
        restart(2)
    assert restart(3) == 3
    assert get(device.echo.remote(4)) == 4


def test_a_constructor_that_has_raised_at_first_is_run_again(tmp_path):
    busy = tmp_path / "busy"
    busy.touch()
    device = Device.remote(busy)
    with pytest.raises(ActorDiedError, match="the device is busy"):
        get(device.echo.remote(1))
    graph = chain(device.echo).compile()
    busy.unlink()
    graph.restart()
    assert get(graph.execute(2)) == 2
