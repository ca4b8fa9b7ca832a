"""Values whose code raises what is no Exception while they are sent or rebuilt, as panics of Rust do."""

import os
import signal
import threading

import pytest
from integration_helpers import chain, compiled, get

import conveyor
from conveyor.exceptions import ActorDiedError, SerializationError, TaskError


class Panic(BaseException):
    """As pyo3_runtime.PanicException."""


class CannotBeSent:
    def __init__(self, error=Panic):
        self.error = error

    def __reduce__(self):
        raise self.error("refused")


def refuse(error):
    raise error("refused")


class CannotBeRebuilt:
    def __init__(self, error=Panic):
        self.error = error

    def __reduce__(self):
        return refuse, (self.error,)


class TellsNothing(Exception):
    """An exception that panics wherever it is asked for something."""

    def __init__(self):
        super().__init__(CannotBeSent())

    def __str__(self):
        raise Panic


class LeavesWhereRebuilt(Exception):
    """An exception whose own way to be pickled ends who gets it."""

    def __reduce__(self):
        return refuse, (SystemExit,)


class HasWhatLeaves(Exception):
    def __init__(self):
        super().__init__("has it")
        self.part = CannotBeRebuilt(SystemExit)


KINDS = {"sent": CannotBeSent, "rebuilt": CannotBeRebuilt}


@conveyor.remote
class Actor:
    def make(self, kind, error=Panic):
        return KINDS[kind](error)

    def items(self, kind):
        yield 1
        yield KINDS[kind]()

    def fail(self):
        raise TellsNothing

    def take(self, value):
        return 1

    def same(self, value):
        return value

    @conveyor.method(num_returns=2)
    def two(self):
        return 1, CannotBeSent()

    async def later(self, kind):
        return KINDS[kind]()


@conveyor.remote
class Plain:
    def make(self, kind, error=Panic):
        return KINDS[kind](error)

    def take(self, value):
        return 1

    def take_two(self, one, two):
        return 2

    def same(self, value):
        return value

    def fail(self, kind):
        raise kind()


ACTORS = pytest.mark.parametrize("actors", [Actor, Plain], ids=["on a loop", "plain"])


def unharmed(actor):
    return get(actor.same.remote(5)) == 5


@ACTORS
def test_an_argument(engine, actors):
    actor = actors.remote()
    with pytest.raises(
        SerializationError, match=r"argument 0 of .*take.*cannot be sent: Panic: refused"
    ):
        actor.take.remote(CannotBeSent())
    with pytest.raises(SerializationError, match="Panic: refused"):
        get(actor.take.remote(CannotBeRebuilt()))
    assert unharmed(actor)


@ACTORS
@pytest.mark.parametrize("kind", KINDS)
def test_a_result(engine, actors, kind):
    actor = actors.remote()
    ref = actor.make.remote(kind)
    with pytest.raises(SerializationError, match="Panic: refused"):
        get(ref)
    with pytest.raises(SerializationError, match="Panic: refused"):  # and again
        get(ref)
    assert unharmed(actor)


@pytest.mark.parametrize("kind", KINDS)
def test_a_result_of_a_coroutine(local, kind):
    actor = Actor.remote()
    with pytest.raises(SerializationError, match="Panic: refused"):
        get(actor.later.remote(kind))
    assert unharmed(actor)


def test_one_of_several_results(local):
    actor = Actor.remote()
    with pytest.raises(SerializationError, match=r"result 1 of Actor.two.*Panic: refused"):
        get(actor.two.remote()[0])
    assert unharmed(actor)


@pytest.mark.parametrize("kind", KINDS)
def test_an_item(local, kind):
    actor = Actor.remote()
    items = actor.items.remote(kind)
    assert next(items) == 1
    with pytest.raises(SerializationError, match="Panic: refused"):
        next(items)
    assert unharmed(actor)


def test_an_error(local):
    actor = Actor.remote()
    with pytest.raises(TaskError, match=r"str\(\) of the exception failed: Panic"):
        get(actor.fail.remote())
    assert unharmed(actor)


@pytest.mark.parametrize("kind", KINDS)
def test_in_a_graph(engine, kind):
    actor, other = Plain.remote(), Plain.remote()
    graph = compiled(lambda inp: other.same.bind(actor.make.bind(inp)))
    with pytest.raises(SerializationError, match="Panic: refused"):
        get(graph.execute(kind))
    with pytest.raises(SerializationError, match="Panic: refused"):
        get(graph.execute(kind))
    echo = chain(actor.same).compile()
    with pytest.raises(SerializationError, match="Panic: refused"):
        get(echo.execute(KINDS[kind]()))
    assert get(echo.execute(3)) == 3
    assert unharmed(actor)
    assert unharmed(other)


@pytest.mark.parametrize("kind", KINDS)
def test_a_constant(local, kind):
    actor = Plain.remote()
    with pytest.raises(SerializationError, match="Panic: refused"):
        get(actor.take.bind(KINDS[kind]()).compile().execute())
    assert unharmed(actor)


@pytest.mark.parametrize("kind", KINDS)
def test_an_argument_of_a_constructor(local, kind):
    class Made:
        def __init__(self, value):
            self.value = value

        def ping(self):
            return 1

    with pytest.raises(SerializationError, match="Panic: refused"):
        get(conveyor.remote(Made).remote(KINDS[kind]()).ping.remote())


@pytest.mark.parametrize("error", [Panic, SystemExit, KeyboardInterrupt])
def test_an_argument_of_a_call_that_waits(local, tmp_path, error):
    """It is taken when the call is made, as of one that is sent at once."""

    class Slow:
        def wait(self, path):
            while not os.path.exists(path):
                threading.Event().wait(0.005)

    slow, actor = conveyor.remote(Slow).remote(), Plain.remote()
    late = slow.wait.remote(str(tmp_path / "go"))
    raised, text = SerializationError, "Panic: refused"
    if error is not Panic:  # it is the program's, whose main thread this is
        raised, text = error, "refused"
    for first in (5, late):
        with pytest.raises(raised, match=text):
            actor.take_two.remote(first, CannotBeSent(error))
    behind = actor.take_two.remote(late, 5)
    (tmp_path / "go").touch()
    get(behind)
    assert unharmed(actor)


def test_a_keyboard_interrupt_that_an_actor_raises_is_an_error(local):
    actor = Plain.remote()
    with pytest.raises(SerializationError, match="KeyboardInterrupt: refused"):
        get(actor.make.remote("sent", KeyboardInterrupt))
    with pytest.raises(SerializationError, match="KeyboardInterrupt: refused"):
        get(actor.take.remote(CannotBeRebuilt(KeyboardInterrupt)))
    assert unharmed(actor)


def test_an_exit_of_a_result_names_the_call(local):
    actor = Plain.remote()
    with pytest.raises(ActorDiedError, match=r"left by sys.exit.* while running make \(call 1\)"):
        get(actor.make.remote("sent", SystemExit))


def test_an_exit_where_an_error_is_rebuilt_is_no_exit_of_who_gets_it(engine):
    actor = Plain.remote()
    with pytest.raises(LeavesWhereRebuilt) as raised:  # without the code of its own
        get(actor.fail.remote(LeavesWhereRebuilt))
    assert isinstance(raised.value, TaskError)
    with pytest.raises(TaskError, match=r"has it\n.*cannot be rebuilt here: SystemExit: refused"):
        get(actor.fail.remote(HasWhatLeaves))
    graph = compiled(actor.fail.bind)
    with pytest.raises(TaskError, match=r"has it\n.*cannot be rebuilt here: SystemExit: refused"):
        get(graph.execute(HasWhatLeaves))
    assert unharmed(actor)


def test_an_exit_of_a_coroutines_result_names_the_call(local):
    class Later:
        async def make(self):
            return CannotBeSent(SystemExit)

    actor = conveyor.remote(Later).remote()
    with pytest.raises(ActorDiedError, match=r"left by sys.exit.* while running make \(call 1\)"):
        get(actor.make.remote())


def test_an_exit_of_an_argument_names_the_call(local):
    actor = Plain.remote()
    assert unharmed(actor)
    with pytest.raises(
        ActorDiedError, match=r"left by sys.exit.* while running arguments \(call 2\)"
    ):
        get(actor.take.remote(CannotBeRebuilt(SystemExit)))


def test_an_exit_of_an_argument_inline():
    conveyor.init(engine="inline")
    try:
        actor = Plain.remote()
        with pytest.raises(ActorDiedError, match=r"left by sys.exit.* running take \(call 1\)"):
            get(actor.take.remote(CannotBeRebuilt(SystemExit)))
    finally:
        conveyor.shutdown()


@pytest.mark.parametrize("kind", KINDS)
def test_an_exit_in_a_graph_names_a_step(local, kind):
    actor, other = Plain.remote(), Plain.remote()
    graph = compiled(lambda inp: other.same.bind(actor.make.bind(inp[0], inp[1])))
    with pytest.raises(ActorDiedError, match=r"left by sys.exit.* while running Plain"):
        get(graph.execute(kind, SystemExit))


class Late(BaseException):
    """As a watchdog raises it."""


def test_what_a_signal_handler_raises_is_no_fault_of_a_value(engine):
    def late(number, frame):
        raise Late

    class Signals:
        def __reduce__(self):
            signal.raise_signal(signal.SIGUSR1)
            return str, ()

    actor = Plain.remote()
    before = signal.signal(signal.SIGUSR1, late)
    try:
        with pytest.raises(Late):
            actor.take.remote(Signals())
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert unharmed(actor)


def test_an_interrupt_while_an_argument_is_sent_comes_out_of_the_call(engine):
    actor = Plain.remote()
    with pytest.raises(KeyboardInterrupt):
        actor.take.remote(CannotBeSent(KeyboardInterrupt))
    assert unharmed(actor)
