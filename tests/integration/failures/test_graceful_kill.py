"""``conveyor.kill(actor, graceful=True)`` and what else ends an actor in good order, while it is used: what
runs is done, what has not begun is refused with an error that says why. The same on both engines."""

import asyncio
import sys
import threading

import cloudpickle
import pytest
from integration_helpers import WAIT, compiled, get, hold

import conveyor
from conveyor.exceptions import ActorDiedError
from conveyor.runtime import context

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.usefixtures("time_to_end")

ENDED = r"actor busy .* was ended by conveyor\.kill\(graceful=True\)"


class Busy:
    def __init__(self, log):
        self.log = log

    def note(self, text):
        with open(self.log, "a") as file:
            print(text, file=file)

    def hold(self, inside, go):
        self.note("begun")
        open(inside, "w").close()
        hold(go)
        self.note("done")
        return "result"

    def echo(self, x):
        self.note("echo")
        return x

    def items(self, n):
        yield from range(n)

    def end_itself(self, me):
        conveyor.kill(me[0], graceful=True)
        self.note("goes on")
        return "result"

    def __conveyor_exit__(self):
        self.note("hook")


class AsyncBusy(Busy):
    async def sleep(self, inside):
        open(inside, "w").close()
        await asyncio.sleep(600)


class Background:
    """What a thread does to its end, its value or its error."""

    def __init__(self, work):
        self.value = self.error = None

        def run():
            try:
                self.value = work()
            except Exception as error:
                self.error = error

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def join(self):
        self._thread.join(WAIT)
        assert not self._thread.is_alive()
        return self


@pytest.fixture(params=[Busy, AsyncBusy])
def busy(request, engine, tmp_path):
    return conveyor.remote(request.param).options(name="busy").remote(str(tmp_path / "log"))


def until_its_end_has_begun(engine, wait_until):
    """Of the only actor that there is, which runs something."""
    runtime = context.running()
    if engine == "inline":
        (actor,) = runtime._actors.values()
        wait_until(lambda: not actor.alive)
    else:
        (record,) = runtime.table
        wait_until(lambda: record.killed)


def log(tmp_path):
    return (tmp_path / "log").read_text().split("\n")[:-1]


def refusals(busy, graph):
    """The texts of what is asked of an actor whose end has begun, or is about to begin: then it is
    queued, and dropped."""
    texts = []
    for ask in (
        lambda: get(busy.echo.remote(1)),
        lambda: list(busy.items.remote(3)),
        lambda: get(graph.execute(1)),
        lambda: busy.echo.bind(1).compile(),
    ):
        with pytest.raises(ActorDiedError, match=ENDED) as raised:
            ask()
        texts.append(str(raised.value))
    return texts


def test_a_call_that_has_begun_is_done_and_others_are_refused(
    busy, engine, latches, tmp_path, wait_until
):
    inside, go = latches(), latches()
    graph = compiled(busy.echo.bind)
    assert get(graph.execute(0)) == 0
    begun = Background(lambda: get(busy.hold.remote(inside.path, go.path)))
    wait_until(lambda: inside.is_open)
    killer = Background(lambda: conveyor.kill(busy, graceful=True))
    requested = Background(lambda: refusals(busy, graph))
    until_its_end_has_begun(engine, wait_until)
    go.open()
    assert begun.join().value == "result", begun.error
    assert len(requested.join().value or ()) == 4, requested.error
    assert killer.join().error is None
    assert log(tmp_path) == ["echo", "begun", "done", "hook"]
    assert len(refusals(busy, graph)) == 4


def test_a_step_that_has_begun_is_done(busy, latches, tmp_path, wait_until):
    inside, go = latches(), latches()
    graph = compiled(lambda inp: busy.hold.bind(inp, go.path))
    begun = Background(lambda: get(graph.execute(inside.path)))
    wait_until(lambda: inside.is_open)
    killer = Background(lambda: conveyor.kill(busy, graceful=True))
    go.open()
    assert begun.join().value == "result", begun.error
    assert killer.join().error is None
    assert log(tmp_path) == ["begun", "done", "hook"]
    with pytest.raises(ActorDiedError, match=ENDED):
        get(graph.execute(inside.path))


def test_coroutines_are_cancelled(engine, latches, tmp_path, wait_until):
    inside = latches()
    busy = conveyor.remote(AsyncBusy).options(name="busy").remote(str(tmp_path / "log"))
    refs = [busy.sleep.remote(inside.path) for _ in range(3)]
    wait_until(lambda: inside.is_open)
    conveyor.kill(busy, graceful=True)
    for ref in refs:
        with pytest.raises(ActorDiedError, match=ENDED):
            get(ref)
    assert log(tmp_path) == ["hook"]


def test_an_actor_that_ends_itself_goes_on_until_its_method_returns(busy, tmp_path, wait_until):
    assert get(busy.end_itself.remote([busy])) == "result"
    wait_until(lambda: len(log(tmp_path)) == 2)
    assert log(tmp_path) == ["goes on", "hook"]
    with pytest.raises(ActorDiedError, match=ENDED):
        get(busy.echo.remote(1))


@pytest.mark.parametrize("engine", ["local", "inline"])
def test_a_session_that_ends_lets_what_runs_be_done(
    leaves_nothing, latches, tmp_path, wait_until, engine
):
    inside, go = latches(), latches()

    def session():
        conveyor.init(engine=engine)
        busy = conveyor.remote(Busy).options(name="busy").remote(str(tmp_path / "log"))
        begun = Background(lambda: get(busy.hold.remote(inside.path, go.path)))
        wait_until(lambda: inside.is_open)
        ending = Background(conveyor.shutdown)
        if engine == "local":  # who waits is told at once; inline it is who runs the method
            begun.join()
        else:
            until_its_end_has_begun(engine, wait_until)
        go.open()
        assert isinstance(begun.join().error, conveyor.exceptions.SessionEndedError)
        assert ending.join().error is None

    with leaves_nothing():
        session()
    assert log(tmp_path) == ["begun", "done", "hook"]


SELF = """
    import sys, threading
    import conveyor

    @conveyor.remote
    class Actor:
        def meet(self, me):
            self.me = me[0]
        def begin(self):
            self.thread = threading.Thread(target=self.ask, name="asker")
            self.thread.start()
        def ask(self):
            while True:
                try:
                    conveyor.get(self.me.echo.remote(1))
                except conveyor.exceptions.ActorDiedError as error:
                    print("thread:", str(error).splitlines()[0], flush=True)
                    return
        def echo(self, x):
            return x
        def __conveyor_exit__(self):
            try:
                print(conveyor.get(self.me.echo.remote(2)))
            except conveyor.exceptions.ActorDiedError as error:
                print("hook:", str(error).splitlines()[0], flush=True)
            if threading.current_thread() is not self.thread:  # inline it may be who ends it
                self.thread.join()

    conveyor.init(engine=sys.argv[1], grace_seconds=30)
    actor = Actor.options(name="a", max_concurrency=int(sys.argv[2])).remote()
    conveyor.get(actor.meet.remote([actor]))
    conveyor.get(actor.begin.remote())
    conveyor.kill(actor, graceful=True)
    for thread in threading.enumerate():
        if thread.name == "asker":
            thread.join()
    conveyor.shutdown()
"""


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("engine", ["local", "inline"])
def test_what_an_ending_actor_asks_of_itself_is_refused(scripts, engine, threads):
    """Nobody would answer, and it would wait until it is killed."""
    out = scripts.run(SELF, engine, threads)
    if engine == "local":
        why = "actor a is ending, and begins no more calls: nor one of its own"
    else:
        why = "was ended by conveyor.kill(graceful=True)"
    # Inline two threads of one process may print into each other's lines.
    assert [out.count(text) for text in ("thread:", "hook:", why)] == [1, 1, 2], out
    assert "killed" not in scripts.stderr
