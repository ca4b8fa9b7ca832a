"""An error that was caught keeps nothing of its catcher: neither streams, nor refs, nor memory.

Whatever raises it may keep the error, but not the frames that it has passed. Nothing is collected here.
"""

import gc
import sys
import weakref

import pytest

import conveyor
from conveyor.dag import InputNode
from conveyor.exceptions import ConveyorError

WAIT = 60


class Unpicklable:
    def __reduce__(self):
        raise ValueError("not this one")


class Breaks:
    """Can be sent, and cannot be loaded."""

    def __reduce__(self):
        return _break, ()


def _break():
    raise ValueError("broken on the way")


@conveyor.remote
class Maker:
    def same(self, x=None):
        return x

    def fail(self, x=None):
        raise ValueError("as told")

    def broken(self, x=None):
        return Breaks()

    def items(self, how, broken=False):
        yield 1
        if broken:
            yield Breaks()
            yield Breaks()
        if how == "fails":
            raise ValueError("as told")
        yield 3

    def leave(self):
        sys.exit(3)

    def two(self):
        return 1, 2, 3


@pytest.fixture(params=["local", "inline"])
def engine(request):
    conveyor.init(engine=request.param)
    yield request.param
    conveyor.shutdown()


@pytest.fixture
def maker(engine):
    made = Maker.remote()
    conveyor.get(made.same.remote(), timeout=WAIT)
    return made


def graph_of(maker, method="same", **options):
    with InputNode() as x:
        return getattr(maker, method).bind(x).compile(**options)


def dead(maker):
    conveyor.kill(maker)
    with pytest.raises(ConveyorError):
        conveyor.get(maker.same.remote(), timeout=WAIT)
    return maker


def get_of_the_dead(maker):
    ref = maker.leave.remote()
    return lambda: ref.get()


def call_of_the_dead(maker):
    dead(maker)
    return lambda: maker.same.remote(1)


def get_of_several_of_the_dead(maker):
    refs = [maker.leave.remote()] * 2
    return lambda: conveyor.get(refs)


def next_of_the_dead(maker):
    stream = maker.items.remote("ends")
    assert stream.next() == 1
    dead(maker)
    for _ in range(5):  # one had been asked for
        try:
            stream.next()
        except ConveyorError:
            break
    return lambda: stream.next()


def open_of_the_dead(maker):
    dead(maker)
    return lambda: maker.items.remote("ends").next()


def execute_of_the_dead(maker):
    graph = graph_of(maker)
    dead(maker)
    return lambda: graph.execute(1).get()


def get_of_a_graph_of_the_dead(maker):
    graph = graph_of(maker)
    dead(maker)
    with pytest.raises(ConveyorError):
        graph.execute(1).get()
    return lambda: graph.execute(1)


def execute_after_teardown(maker):
    graph = graph_of(maker)
    graph.teardown()
    return lambda: graph.execute(1)


def get_after_teardown(maker):
    graph = graph_of(maker, "fail")
    ref = graph.execute(1)
    graph.teardown()
    return lambda: ref.get()


def restart_after_teardown(maker):
    graph = graph_of(maker)
    graph.teardown()
    return lambda: graph.restart()


def compile_of_the_dead(maker):
    dead(maker)
    return lambda: graph_of(maker)


def get_of_a_failed_task(maker):
    ref = graph_of(maker, "fail").execute(1)
    return lambda: ref.get()


def get_of_a_failed_call(maker):
    ref = maker.fail.remote()
    return lambda: ref.get()


def get_of_a_broken_result(maker):
    ref = maker.broken.remote()
    return lambda: ref.get()


def get_of_a_broken_result_of_a_graph(maker):
    ref = graph_of(maker, "broken").execute(1)
    return lambda: ref.get()


def next_of_a_failed_call(maker):
    stream = maker.items.remote("fails")
    stream.next()
    return lambda: stream.next()


def next_of_a_failed_task(maker):
    stream = graph_of(maker, "items").execute("fails")
    stream.next()
    return lambda: stream.next()


def next_that_is_broken(maker):
    with InputNode() as x:
        graph = maker.items.bind(x, broken=True).compile()
    stream = graph.execute("ends")
    stream.next()
    return lambda: stream.next()


def get_of_a_cancelled_execution(maker):
    graph = graph_of(maker)
    refs = [graph.execute(1)]
    refs[0].cancel()
    return lambda: refs[0].get() and 1 / 0  # it may have been too late


def next_of_a_cancelled_call(maker):
    stream = maker.items.remote("ends")
    stream.cancel()
    return lambda: stream.next()


def call_with_what_cannot_be_sent(maker):
    return lambda: maker.same.remote(Unpicklable()).get()


def call_with_what_cannot_be_loaded(maker):
    return lambda: maker.same.remote(Breaks()).get()


def execute_with_what_cannot_be_sent(maker):
    graph = graph_of(maker)
    return lambda: graph.execute(Unpicklable())


def execute_with_what_cannot_be_loaded(maker):
    graph = graph_of(maker)
    return lambda: graph.execute(Breaks()).get()


def bind_of_what_cannot_be_sent(maker):
    return lambda: maker.same.bind(Unpicklable()).compile()


def execute_with_a_ref_that_failed(maker):
    failed, graph = maker.fail.remote(), graph_of(maker)
    return lambda: graph.execute(failed).get()


def bind_of_a_ref_that_failed(maker):
    failed = maker.fail.remote()
    return lambda: maker.same.bind(failed).compile()


def call_with_a_ref_that_failed(maker):
    failed = maker.fail.remote()
    return lambda: maker.same.remote(failed).get()


def put_of_what_cannot_be_sent(maker):
    return lambda: conveyor.put(Unpicklable())


def an_actor_that_cannot_be_made(maker):
    @conveyor.remote
    class Fails:
        def __init__(self):
            raise ValueError("as told")

        def same(self, x):
            return x

    actor = Fails.remote()
    return lambda: conveyor.get(actor.same.remote(1))


def a_name_that_is_taken(maker):
    Maker.options(name="taken").remote()
    return lambda: Maker.options(name="taken").remote()


def too_many_results(maker):
    ref = maker.two.options(num_returns=2).remote()[0]
    return lambda: ref.get()


CASES = [
    get_of_the_dead,
    call_of_the_dead,
    get_of_several_of_the_dead,
    next_of_the_dead,
    open_of_the_dead,
    execute_of_the_dead,
    get_of_a_graph_of_the_dead,
    execute_after_teardown,
    get_after_teardown,
    restart_after_teardown,
    compile_of_the_dead,
    get_of_a_failed_task,
    get_of_a_failed_call,
    get_of_a_broken_result,
    get_of_a_broken_result_of_a_graph,
    next_of_a_failed_call,
    next_of_a_failed_task,
    next_that_is_broken,
    get_of_a_cancelled_execution,
    next_of_a_cancelled_call,
    call_with_what_cannot_be_sent,
    call_with_what_cannot_be_loaded,
    execute_with_what_cannot_be_sent,
    execute_with_what_cannot_be_loaded,
    bind_of_what_cannot_be_sent,
    execute_with_a_ref_that_failed,
    bind_of_a_ref_that_failed,
    call_with_a_ref_that_failed,
    put_of_what_cannot_be_sent,
    an_actor_that_cannot_be_made,
    a_name_that_is_taken,
    too_many_results,
]


KEPT_FOR_THE_DEBUGGER = [next_that_is_broken, call_with_what_cannot_be_loaded]


class Local:
    """What a catcher has."""


def catch(operation):
    """Whether ``operation`` has raised, and what refers to a local of this function as long as that lives."""
    local = Local()
    try:
        operation()
    except Exception:
        return True, weakref.ref(local)
    return False, weakref.ref(local)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_an_error_keeps_nothing_of_its_catcher(engine, maker, case):
    if engine == "inline" and case in KEPT_FOR_THE_DEBUGGER:
        pytest.skip(
            "inline, what breaks keeps its frames for the debugger: its catcher's are among them"
        )
    operation = case(maker)
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            raised, kept = catch(operation)
            assert raised
            assert kept() is None, "the catcher's frame is kept"
    finally:
        gc.enable()


@conveyor.remote
class Counts:
    def __init__(self):
        self.open = 0

    def items(self):
        self.open += 1
        try:
            yield 1
            yield 2
        finally:
            self.open -= 1

    def left(self):
        return self.open


def take_from(streams):
    while True:
        for stream in streams:
            stream.next()


def test_a_dropped_stream_ends_after_another_ones_error(engine):
    """Its generator is closed, although the error of one that is kept has passed frames that held it."""
    struck, other = Maker.remote(), Counts.remote()
    kept = struck.items.remote("ends")
    kept.next()
    conveyor.kill(struck)

    def catch_with_a_stream():
        dropped = other.items.remote()
        assert dropped.next() == 1
        with pytest.raises(ConveyorError):
            take_from([kept])

    gc.disable()
    try:
        catch_with_a_stream()
        while conveyor.get(other.left.remote(), timeout=WAIT):
            pass
    finally:
        gc.enable()
