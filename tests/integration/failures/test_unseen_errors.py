"""An error that nobody will ever get leaves one line in the log, and one that somebody gets leaves none."""

import asyncio
import gc
import logging
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from integration_helpers import WAIT, get, hold

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import ActorDiedError
from conveyor.refs.streams import StreamRef


@conveyor.remote
class Actor:
    tries = 0

    def __init__(self, text=None):
        if text is not None:
            raise RuntimeError(text)

    def fail(self, text, *rest):
        raise RuntimeError(text)

    def fail_if(self, x, text):
        if x < 0:
            raise RuntimeError(text)
        return x

    @conveyor.method(max_task_retries=2, retry_exceptions=True)
    def third(self, text):
        self.tries += 1
        if self.tries < 3:
            raise RuntimeError(text)

    def echo(self, x):
        return x

    def items(self, text):
        yield 1
        raise RuntimeError(text)


@conveyor.remote
def fails(text):
    raise RuntimeError(text)


def compiled(text, **options):
    ranks = [Actor.remote() for _ in range(3)]
    with InputNode() as inp:
        dag = MultiOutputNode(
            [ranks[0].echo.bind(inp), ranks[1].fail_if.bind(inp, text), ranks[2].echo.bind(inp)]
        )
    return dag.compile(**options)


def drop_execution(text):
    graph = compiled(text)
    refs = graph.execute(-1)
    refs[0].done()
    del refs
    gc.collect()
    conveyor.get(graph.execute(1), timeout=WAIT)
    graph.teardown()


def drop_held_execution(text):
    graph = compiled(text)
    refs = graph.execute(-1)
    conveyor.wait(refs, num_returns=3, timeout=WAIT)
    del refs
    gc.collect()
    graph.teardown()


def drop_one_alone(text):
    graph = compiled(text, fail_fast=False)
    refs = graph.execute(-1)
    conveyor.wait(refs, num_returns=3, timeout=WAIT)
    assert get(refs[0]) == -1
    del refs
    gc.collect()
    graph.teardown()


def drop_done(text):
    ref = Actor.remote().fail.remote(text)
    conveyor.wait([ref], timeout=WAIT)
    del ref
    gc.collect()


def drop_dependent(text):
    actor = Actor.remote()
    ref = actor.echo.remote(actor.fail.remote(text))
    conveyor.wait([ref], timeout=WAIT)


def drop_dependent_execution(text):
    graph = compiled("another")
    refs = graph.execute(Actor.remote().fail.remote(text))
    conveyor.wait(refs, num_returns=3, timeout=WAIT)
    del refs
    graph.teardown()


def constructed(text):
    actor = Actor.remote(text)
    with InputNode() as inp:
        return actor.echo.bind(inp).compile().execute(1)


UNSEEN = {
    "call of a failed one": drop_dependent,
    "execution of a failed one": drop_dependent_execution,
    "call": lambda text: Actor.remote().fail.remote(text),
    "call that is done": drop_done,
    "function": lambda text: fails.remote(text),
    "retried": lambda text: Actor.remote().fail.options(max_task_retries=1).remote(text),
    "constructor": lambda text: Actor.remote(text),
    "constructor of an actor that is called": lambda text: Actor.remote(text).echo.remote(1),
    "execution": drop_execution,
    "execution that is done": drop_held_execution,
    "one result": drop_one_alone,
}


def raising(call):
    with pytest.raises(RuntimeError):
        call()


SEEN = {
    "call": lambda text: raising(lambda: get(Actor.remote().fail.remote(text))),
    "function": lambda text: raising(lambda: get(fails.remote(text))),
    "tries before the last": lambda text: get(Actor.remote().third.remote(text)),
    "constructor": lambda text: raising(lambda: get(Actor.remote(text).echo.remote(1))),
    "first of an execution": lambda text: raising(lambda: get(compiled(text).execute(-1)[0])),
    "all of an execution": lambda text: raising(lambda: get(compiled(text).execute(-1))),
    "items": lambda text: raising(lambda: list(Actor.remote().items.remote(text))),
    "constructor, in a graph": lambda text: raising(lambda: get(constructed(text))),
    "argument": lambda text: raising(
        lambda: get(Actor.remote().echo.remote(Actor.remote().fail.remote(text)))
    ),
}


def lines(caplog):
    return [r.getMessage() for r in caplog.records if "nobody has got" in r.getMessage()]


@pytest.mark.usefixtures("engine")
def test_errors_that_nobody_gets(caplog, wait_until):
    def said():
        return {way: sum(f"lost in {way}, " in line for line in lines(caplog)) for way in UNSEEN}

    with caplog.at_level(logging.WARNING, "conveyor"):
        for way, call in UNSEEN.items():
            call(f"lost in {way}, of course")
        gc.collect()
        wait_until(lambda: all(said().values()), WAIT)
        kept = Actor.remote("lost in a constructor whose actor is there to the end")
        conveyor.wait([Actor.remote().echo.remote(1)], timeout=WAIT)
        conveyor.shutdown()
        del kept
    assert said() == dict.fromkeys(UNSEEN, 1)
    assert not any("[...]" in line for line in lines(caplog))
    assert sum("there to the end" in line for line in lines(caplog)) == 1


@pytest.mark.usefixtures("engine")
def test_errors_that_somebody_gets(caplog):
    with caplog.at_level(logging.WARNING, "conveyor"):
        for way, call in SEEN.items():
            call(f"seen in {way}")
        gc.collect()
        conveyor.shutdown()
    assert lines(caplog) == []


@conveyor.remote
class Dies:
    def __init__(self, dies=False):
        if dies:
            os._exit(3)

    def pid(self):
        return os.getpid()

    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def leave(self, code):
        raise SystemExit(code)

    def wait(self, path):
        hold(path)


@conveyor.remote
def leaves(code):
    os._exit(code)


def execute_to_death(actor):
    with InputNode():
        graph = actor.die.bind().compile()
    graph.execute()
    return graph


def call_until_dead(actor):
    with suppress(ActorDiedError):  # by the call itself, once the death is known
        for _ in range(64):
            actor.die.remote()


#: Each ends a process that nobody has asked to end; what each returns is held meanwhile.
DEATHS = {
    "call": lambda actor: actor.die.remote() is None,
    "many calls": call_until_dead,
    "call that is waited for": lambda actor: conveyor.wait([actor.die.remote()], timeout=WAIT),
    "exit": lambda actor: actor.leave.remote(5) is None,
    "function": lambda actor: leaves.remote(5) is None,
    "constructor": lambda actor: Dies.remote(True),
    "dropped constructor": lambda actor: Dies.remote(True) is None,
    "execution": execute_to_death,
    "idle": lambda actor: os.kill(get(actor.pid.remote()), signal.SIGKILL),
}


@pytest.mark.parametrize("way", DEATHS)
def test_each_death_leaves_a_line(way, local, caplog, wait_until):
    with caplog.at_level(logging.WARNING, "conveyor"):
        actor = Dies.remote()
        get(actor.pid.remote())
        held = DEATHS[way](actor)
        gc.collect()
        wait_until(lambda: caplog.messages, WAIT)
        conveyor.shutdown()
        del held
    (line,) = caplog.messages
    assert line.startswith("actor ")
    assert "pid" in line


def test_an_end_that_was_asked_for_leaves_no_line(local, caplog, tmp_path, wait_until):
    with caplog.at_level(logging.WARNING, "conveyor"):
        killed, left, torn, dropped, ended = [Dies.remote() for _ in range(5)]
        pids = get([actor.pid.remote() for actor in (killed, left, torn, dropped, ended)])
        killed.wait.remote(str(tmp_path / "never"))
        conveyor.kill(killed)
        left.leave.remote(0)
        with InputNode():
            graph = torn.wait.bind(str(tmp_path / "never")).compile()
        graph.execute()
        graph.teardown(kill_actors=True)
        dropped.pid.remote()
        del dropped, left, torn, graph
        gc.collect()
        wait_until(lambda: not any(map(psutil.pid_exists, pids[:4])), WAIT)
        ended.wait.remote(str(tmp_path / "end"))
        (tmp_path / "end").touch()
        conveyor.shutdown()
    assert caplog.messages == []


def test_the_lines_of_deaths_are_bounded(local, caplog):
    with caplog.at_level(logging.WARNING, "conveyor"):
        actor = Dies.options(max_restarts=-1).remote()
        for _ in range(25):
            with pytest.raises(ActorDiedError):
                get(actor.die.remote())
        conveyor.shutdown()
    assert len(caplog.messages) == 21
    assert "further deaths" in caplog.messages[-1]


@pytest.mark.usefixtures("engine")
def test_the_lines_are_bounded(caplog, wait_until):
    with caplog.at_level(logging.WARNING, "conveyor"):
        actor = Actor.remote()
        for number in range(50):
            actor.fail.remote(f"number {number}")
        get(actor.echo.remote(1))
        wait_until(lambda: len(lines(caplog)) == 20, WAIT)
        conveyor.shutdown()
    assert len(lines(caplog)) == 20
    assert sum("further errors" in r.getMessage() for r in caplog.records) == 1


def test_a_handler_of_the_log_may_call_actors_and_raise(engine, wait_until):
    actor = Actor.remote()
    told = []

    class Ships(logging.Handler):
        def emit(self, record):
            if "nobody has got" in record.getMessage():
                told.append(threading.current_thread())
                get(actor.echo.remote(record.getMessage()))
                raise OSError("the server of the log is not there")

    logger, handler = logging.getLogger("conveyor"), Ships()
    logger.addHandler(handler)
    try:
        for number in range(3):
            failed = actor.fail.remote("no")
            conveyor.wait(
                [actor.echo.remote(failed)], timeout=WAIT
            )  # dropped in the middle of what sends it
            raising(lambda failed=failed: get(failed))
            del failed
            gc.collect()
            wait_until(lambda number=number: len(told) > number, WAIT)
        assert get(actor.echo.remote(2)) == 2
    finally:
        logger.removeHandler(handler)
    if engine != "inline":
        assert threading.main_thread() not in told


@pytest.mark.usefixtures("engine")
def test_a_line_is_short_however_much_an_error_says(caplog, wait_until):
    with caplog.at_level(logging.WARNING, "conveyor"):
        actor = Actor.remote()
        for size in (10, 1_000, 60_000, 5_000_000):
            actor.fail.remote("word " * (size // 5))
        conveyor.wait([actor.echo.remote(actor.fail.remote("word " * 1_000_000))], timeout=WAIT)
        gc.collect()
        wait_until(lambda: len(lines(caplog)) >= 5, WAIT)
    assert max(len(line) for line in lines(caplog)) < 1_000
    for line in lines(caplog):
        assert "RuntimeError: word word" in line
        assert "(raised in actor 'Actor' and node 'Actor.fail')" in line


class Cleans:
    """Raises when it is cancelled, or later."""

    async def nap(self, begun, seconds):
        Path(begun).touch()
        try:
            await asyncio.sleep(seconds)
        finally:
            raise RuntimeError("cancelled")

    async def items(self, begun, seconds):
        try:
            for number in range(100):
                yield number
                Path(begun).touch()
                await asyncio.sleep(seconds)
        finally:
            raise RuntimeError("cancelled")

    async def fail(self):
        raise RuntimeError("a real one")

    def harmless(self):
        pass


class Ends:
    """Raises at its end, of which nobody hears."""

    def work(self, begun, go_on):
        Path(begun).touch()
        hold(go_on)
        raise RuntimeError("cancelled")

    def items(self, begun, go_on):
        try:
            yield 0
            Path(begun).touch()
            hold(go_on)
            yield 1
        finally:
            raise RuntimeError("cancelled")

    def harmless(self):
        pass


@conveyor.remote
def harmless():
    pass


@conveyor.remote
def works(begun, go_on):
    Ends().work(begun, go_on)


@conveyor.remote
def streams(begun, go_on):
    yield from Ends().items(begun, go_on)


def a_graph(node_of, actor):
    with InputNode() as inp:
        return node_of(actor)(inp[0], inp[1]).compile()


async def read_all(ref):
    if isinstance(ref, StreamRef):
        async for _ in ref:
            pass
    await ref


#: Each begins something of which it tells by the first file. The second, or some seconds, say how long.
CANCELLED = {
    "coroutine": lambda made: made[0].nap.remote,
    "async stream": lambda made: made[0].items.remote,
    "method": lambda made: made[1].work.remote,
    "stream": lambda made: made[1].items.remote,
    "function": lambda made: works.remote,
    "stream of a function": lambda made: streams.remote,
    "execution": lambda made: a_graph(lambda one: one.work.bind, made[1]).execute,
    "coroutine in a graph": lambda made: a_graph(lambda one: one.nap.bind, made[0]).execute,
}


def begin(start, path, length, number):
    ref = start(str(path / str(number)), length)
    if isinstance(ref, StreamRef):
        next(ref)
    return ref


def cancel(start, path, length, times):
    for number in range(times):
        ref = begin(start, path, length, number)
        while number == 0 and not (path / "0").exists():
            time.sleep(0.001)
        assert ref.cancel()


async def cancel_tasks(start, path, length, times):
    for number in range(times):
        task = asyncio.ensure_future(read_all(begin(start, path, length, number)))
        await asyncio.sleep(0)
        while number == 0 and not (path / "0").exists():
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()


@pytest.mark.parametrize("way", ["cancel", "task"])
def test_what_its_caller_has_cancelled_leaves_no_line(way, local, caplog, tmp_path, wait_until):
    made = conveyor.remote(Cleans).remote(), conveyor.remote(Ends).remote()
    with caplog.at_level(logging.WARNING, "conveyor"):
        for what, start in CANCELLED.items():
            path = tmp_path / what
            path.mkdir()
            go_on = path / "go on"
            length = 60 if "coroutine" in what or "async" in what else str(go_on)
            given = start(made), path, length, 1 if "stream" in what else 3
            if way == "task":
                asyncio.run(cancel_tasks(*given))
            else:
                cancel(*given)
            go_on.touch()
            # These are done after what was cancelled.
            get([harmless.remote() for _ in range(8)])
            get([actor.harmless.remote() for actor in made])
        made[0].fail.remote()
        wait_until(lambda: lines(caplog), WAIT)
    (line,) = lines(caplog)
    assert "a real one" in line


@pytest.mark.usefixtures("engine")
def test_constructors_of_actors_with_one_name_have_a_line_each(caplog, wait_until):
    def is_free():
        try:
            conveyor.get_actor("one name")
        except ValueError:
            return True
        return False

    kept = []
    with caplog.at_level(logging.WARNING, "conveyor"):
        for number in range(1, 3):  # with the same text, too
            Actor.options(name="one name").remote("lost uncalled")
            wait_until(is_free, WAIT)
            kept.append(Actor.options(name="one name").remote("lost in a call"))
            conveyor.wait([kept[-1].echo.remote(1)], timeout=WAIT)
            wait_until(lambda: len(lines(caplog)) >= 2 * number, WAIT)  # noqa: B023
        conveyor.shutdown()
    for text in "lost uncalled", "lost in a call":
        assert sum(text in line for line in lines(caplog)) == 2
    assert len(lines(caplog)) == 4
