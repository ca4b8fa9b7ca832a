"""Classes and functions that travel by value stay where they are needed, and go when their maker lets go."""

import collections
import contextlib
import gc
import itertools
import os
import types
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

import conveyor
from conveyor.codec.pickling.definitions import KnownDefinitions
from conveyor.dag import InputNode
from conveyor.exceptions import ActorDiedError

ROUNDS = 12


numbers = itertools.count()


def new_row():
    """An instance of a class of its own and of its own name, as a cursor makes one for each query."""
    row = collections.namedtuple(f"Row{next(numbers)}", ["a", "b"])
    row.__module__ = "__main__"
    return row(1, "x")


class Watch:
    """Which classes of rows are alive in this process."""

    def __init__(self):
        self.seen = weakref.WeakSet()
        self.kept = []

    def note(self, row):
        if type(row) is not tuple:
            self.seen.add(type(row))
        return row

    def take(self, row):
        self.note(row)
        return sum(1 for _ in row)

    def echo(self, row):
        return self.note(row)

    def make(self, *_):
        return self.note(new_row())

    def stream(self, n):
        for _ in range(n):
            yield self.note(new_row())

    def keep(self, row):
        self.kept.append(self.note(row))

    def give(self):
        return self.kept.pop()

    def repeat(self):
        """Each time an instance of one class, until ``forget``."""
        if not self.kept:
            self.kept.append(self.note(new_row()))
        return self.kept[0]

    def forget(self):
        self.kept.clear()

    def receive(self, receiver, n):
        for _ in range(n):
            self.take(receiver.receive())

    def wait_and_take(self, row, _):
        return self.take(row)

    def count(self, rows):
        return sum([1 for row in rows if self.note(row)])

    def pid(self):
        return os.getpid()

    def alive(self):
        gc.collect()
        return len(self.seen)


Actor = conveyor.remote(Watch)


@pytest.fixture
def here(leaves_nothing):
    with leaves_nothing():
        conveyor.init()
        yield Watch()
        conveyor.shutdown()


def nothing_stays(here, *actors):
    """What processes tell each other of with their next frames comes round in a few of them."""
    for _ in range(3):
        here.alive()
        left = conveyor.get([actor.alive.remote() for actor in actors])
    assert (here.alive(), left) == (0, [0] * len(actors))


def test_of_arguments(here):
    actor = Actor.remote()
    for _ in range(ROUNDS):
        assert conveyor.get(actor.take.remote(here.note(new_row()))) == 2
    nothing_stays(here, actor)


def test_of_many_that_are_let_go_of_at_once(here):
    actor = Actor.remote()
    rows = [here.note(new_row()) for _ in range(ROUNDS)]
    conveyor.get([actor.take.remote(row) for row in rows])
    assert conveyor.get(actor.alive.remote()) == ROUNDS
    rows.clear()
    nothing_stays(here, actor)


def test_of_results(here):
    actor = Actor.remote()
    for _ in range(ROUNDS):
        assert here.note(conveyor.get(actor.make.remote())).a == 1
    for row in actor.stream.remote(ROUNDS):
        assert here.note(row).b == "x"
    del row
    nothing_stays(here, actor)


def test_there_and_back(here):
    actor = Actor.remote()
    for _ in range(ROUNDS):
        row = here.note(new_row())
        back = conveyor.get(actor.echo.remote(row))
        assert type(back) is type(row)
    del row, back
    nothing_stays(here, actor)


def test_through_several_actors_of_a_graph(here):
    first, second = Actor.remote(), Actor.remote()
    with InputNode() as given:
        graph = second.echo.bind(first.echo.bind(given)).compile()
    for _ in range(ROUNDS):
        assert here.note(conveyor.get(graph.execute(here.note(new_row())))).a == 1
    for _ in range(3):
        here.alive()
        conveyor.get([actor.alive.remote() for actor in (first, second)])
        conveyor.get(graph.execute((1, 2)))
    nothing_stays(here, first, second)


def test_from_actor_to_actor(here):
    first, second = Actor.remote(), Actor.remote()
    for _ in range(ROUNDS):
        ref = second.echo.remote(first.make.remote())
        assert conveyor.get(first.take.remote(ref)) == 2
        del ref
    nothing_stays(here, first, second)


def test_by_put_and_get(here):
    actor = Actor.remote()
    for _ in range(ROUNDS):
        ref = conveyor.put(here.note(new_row()))
        assert conveyor.get(ref) == (1, "x")
        assert conveyor.get(actor.take.remote(ref)) == 2
        del ref
    nothing_stays(here, actor)


def test_through_a_channel(here):
    actor = Actor.remote()
    sender, receiver = conveyor.channel.open()
    done = actor.receive.remote(receiver, ROUNDS + 1)
    for _ in range(ROUNDS):
        sender.send(here.note(new_row()))
    gc.collect()
    sender.send((1, 2))
    conveyor.get(done)
    nothing_stays(here, actor)


def test_of_calls_that_wait_for_a_value(here):
    actor, other = Actor.remote(), Actor.remote()
    for _ in range(ROUNDS):
        refs = [
            actor.wait_and_take.remote(here.note(new_row()), other.pid.remote()) for _ in range(3)
        ]
        assert conveyor.get(refs) == [2, 2, 2]
    del refs
    nothing_stays(here, actor)


def test_a_class_that_comes_back_when_the_reader_is_not_told_yet(here):
    """The same frame says that the class is gone, and brings it."""
    actor = Actor.remote()
    conveyor.get(actor.keep.remote(here.note(new_row())))
    ref = actor.give.remote()
    conveyor.wait([ref])
    assert here.alive() == 0
    back = conveyor.get(ref)
    for _ in range(3):
        assert type(conveyor.get(actor.echo.remote(back))) is type(back)
    del ref, back
    nothing_stays(here, actor)


def test_an_actor_that_is_started_again_gets_what_it_needs(here):
    actor = Actor.options(max_restarts=1).remote()
    row = here.note(new_row())
    assert conveyor.get(actor.take.remote(row)) == 2
    here.note(conveyor.get(actor.make.remote()))
    first = conveyor.get(actor.pid.remote())
    conveyor.kill(actor, no_restart=False)
    with contextlib.suppress(ActorDiedError):
        conveyor.get(actor.take.remote(row))
    assert conveyor.get(actor.take.remote(row)) == 2
    assert conveyor.get(actor.pid.remote()) != first
    assert conveyor.get(actor.take.remote(row)) == 2
    del row
    nothing_stays(here, actor)


def test_more_than_a_frame_tells_of(here):
    actor = Actor.remote()
    rows = [here.note(new_row()) for _ in range(100)]
    assert conveyor.get(actor.count.remote(rows)) == 100
    rows.clear()
    for _ in range(4):
        here.alive()
        conveyor.get(actor.pid.remote())
    nothing_stays(here, actor)


def test_threads_that_encode_and_let_go_at_once(here):
    actors = [Actor.remote() for _ in range(2)]

    def work():
        for _ in range(ROUNDS):
            row = here.note(new_row())
            refs = [actor.echo.remote(row) for actor in actors]
            del row
            assert all(len(back) == 2 for back in conveyor.get(refs))

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work) for _ in range(4)]:
            done.result()
    nothing_stays(here, *actors)


def test_an_instance_outlives_what_its_maker_has_let_go_of(here):
    actor = Actor.remote()
    conveyor.get(actor.keep.remote(here.note(new_row())))
    for _ in range(3):
        assert here.alive() == 0
        assert conveyor.get(actor.take.remote(new_row())) == 2
    assert here.alive() == 0
    assert conveyor.get([actor.alive.remote() for _ in range(2)])[-1] == 1
    back = conveyor.get(actor.give.remote())
    assert (back.a, back._fields) == (1, ("a", "b"))
    # And goes there once more.
    assert conveyor.get(actor.echo.remote(back)) == back
    assert type(conveyor.get(actor.echo.remote(back))) is type(back)


def test_a_result_that_is_got_late_finds_its_class(here):
    actor = Actor.remote()
    late = [actor.make.remote() for _ in range(3)]
    conveyor.wait(late, num_returns=3)
    for _ in range(ROUNDS):
        here.note(conveyor.get(actor.make.remote()))
        conveyor.get(actor.alive.remote())
    for ref in late:
        first, again = here.note(conveyor.get(ref)), here.note(conveyor.get(ref))
        assert type(first) is type(again)
        assert first._fields == ("a", "b")
    del late, ref, first, again
    nothing_stays(here, actor)


@pytest.mark.parametrize("got", [True, False])
@pytest.mark.parametrize("by", ["calls", "executions"])
def test_a_result_that_is_kept_keeps_its_class_and_no_other(here, by, got):
    actor = Actor.remote()
    make = actor.make.remote
    if by == "executions":
        with InputNode() as given:
            graph = actor.make.bind(given).compile(depth=4)
        make = lambda: graph.execute(0)  # noqa: E731
    kept = []
    for i in range(ROUNDS):
        ref = make()
        if i % 4 == 0:
            kept.append(ref)
        if got or i % 4 != 0:
            here.note(conveyor.get(ref))
        del ref
        conveyor.get(actor.alive.remote())
    for _ in range(3):
        here.alive()
        conveyor.get([make(), actor.alive.remote()])
    assert here.alive() == (len(kept) if got else 0)
    rows = [here.note(conveyor.get(ref)) for ref in kept for _ in range(2)]
    assert len({type(row) for row in rows}) == here.alive() == len(kept) == ROUNDS // 4
    del rows, kept, make
    nothing_stays(here, actor)


def test_results_of_one_class_that_are_kept_among_others(here):
    actor = Actor.remote()
    kept = []
    for _ in range(4):
        kept += [actor.repeat.remote(), actor.make.remote()]
    conveyor.get(actor.forget.remote())
    for _ in range(ROUNDS):
        here.note(conveyor.get(actor.make.remote()))
        conveyor.get(actor.alive.remote())
    assert here.alive() == 0
    rows = [here.note(conveyor.get(ref)) for ref in kept]
    assert len({type(row) for row in rows[::2]}) == 1
    assert len({type(row) for row in rows}) == here.alive() == 5
    del rows, kept
    nothing_stays(here, actor)


def test_results_of_an_execution_that_are_got_late(here):
    actor = Actor.remote()
    with InputNode() as given:
        graph = actor.make.bind(given).compile(depth=8)
    refs = [graph.execute(i) for i in range(6)]
    for ref in reversed(refs):
        assert conveyor.get(ref)._fields == ("a", "b")


def test_nothing_is_made_while_a_value_is_received(here, monkeypatch):
    """Python code would run: another thread could take the value meanwhile, and Ctrl-C lose it."""
    actor = Actor.remote()
    with InputNode() as given:
        graph = actor.make.bind(given).compile(depth=2)
    sender, receiver = conveyor.channel.open()
    sender.send("open")
    assert receiver.receive() == "open"
    assert conveyor.get(actor.pid.remote()) > 0

    def make(_):
        raise RuntimeError("made while a value is received")

    monkeypatch.setattr(KnownDefinitions, "__init__", make)
    for refs in [[actor.make.remote() for _ in range(2)], [graph.execute(0) for _ in range(2)]]:
        for ref in reversed(refs):
            assert conveyor.get(ref)._fields == ("a", "b")
    sender.send(new_row())
    assert receiver.receive()._fields == ("a", "b")


FUNCTIONS = """
    import functools, os
    import conveyor
    from conveyor.dag import InputNode

    N, MODEL = 0, None

    class Large:
        pickled = 0
        def __reduce__(self):
            Large.pickled += 1
            return bytes, (1000,)

    LARGE = Large()

    @functools.lru_cache
    def load():
        return object()

    @conveyor.remote
    def count():
        global N
        N += 1
        return os.getpid(), N

    @conveyor.remote
    def cached():
        load()
        return os.getpid(), load.cache_info().misses

    @conveyor.remote
    def lazy():
        global MODEL
        new = MODEL is None
        MODEL = object()
        return os.getpid(), new

    SUM = 0

    @conveyor.remote
    def add(x):
        global SUM
        SUM += x
        return SUM

    @conveyor.remote
    def large():
        return len(LARGE)

    @conveyor.remote
    class Actor:
        pass

    if __name__ == "__main__":
        def ask(function, times=5):
            found = {}
            for _ in range(times):
                pid, value = conveyor.get(function.remote())
                found.setdefault(pid, []).append(value)
            return list(found.values())
        for counted in ask(count):
            assert counted == list(range(1, len(counted) + 1)), counted
        assert [set(misses) for misses in ask(cached)] == [{1}] * len(ask(cached))
        for news in ask(lazy):
            assert not any(news[1:]), news
        actor = Actor.remote()
        (counted,) = ask(count.options(on=actor))
        assert counted == [1, 2, 3, 4, 5], counted
        # What a graph has brought stays when the graph goes.
        with InputNode() as given:
            graph = add.options(on=actor).bind(given).compile()
        assert [conveyor.get(graph.execute(1)) for _ in range(3)] == [1, 2, 3]
        assert conveyor.get(add.options(on=actor).remote(1)) == 4
        graph.teardown()
        assert conveyor.get(add.options(on=actor).remote(1)) == 5
        assert [conveyor.get(large.remote()) for _ in range(4)] == [1000] * 4
        assert Large.pickled == 1, Large.pickled
"""


def test_functions_of_a_script_keep_their_globals(scripts):
    scripts.run(FUNCTIONS)


WITH_A_REF = """
    import os
    import conveyor

    @conveyor.remote
    def read(ends):
        if ends:
            os._exit(3)
        return conveyor.get(ref)

    @conveyor.remote
    class Actor:
        def echo(self, x):
            return x

    if __name__ == "__main__":
        actor = Actor.remote()
        ref = actor.echo.remote("first")
        assert conveyor.get(read.remote(False)) == "first"
        ref = actor.echo.remote("second")
        assert conveyor.get(read.remote(False)) == "first"
        try:
            conveyor.get(read.remote(True))
        except conveyor.exceptions.ActorDiedError:
            pass
        assert conveyor.get(read.remote(False)) == "first"
"""


def test_a_ref_that_a_function_refers_to_lasts_as_long_as_the_function(scripts):
    scripts.run(WITH_A_REF)


LOCALS = """
    import gc, weakref
    import conveyor

    class Value:
        pass

    class Failure(Exception):
        pass

    @conveyor.remote
    class Actor:
        def __init__(self):
            gc.collect()
            gc.disable()
            self.values = weakref.WeakSet()
        def fail(self):
            value = Value()
            self.values.add(value)
            raise Failure
        def living(self):
            return len(self.values)

    if __name__ == "__main__":
        actor = Actor.remote()
        for _ in range(5):
            try:
                conveyor.get(actor.fail.remote())
            except Failure:
                pass
        assert conveyor.get(actor.living.remote()) == 0
"""


def test_an_error_whose_class_is_sent_keeps_nothing_of_the_method(scripts):
    scripts.run(LOCALS)


NESTED = """
    import functools, os
    import conveyor

    N = 0

    def count():
        global N
        N += 1
        return os.getpid(), N

    class Service:
        @staticmethod
        def count():
            return count()

    def of_factory():
        n, cache = 0, {}
        def counted():
            nonlocal n
            n += 1
            assert cache.setdefault(n, n) == n and len(cache) == n
            return os.getpid(), n
        return counted

    def decorated(function):
        @functools.wraps(function)
        def call(*args):
            return function(*args)
        return call

    @conveyor.remote
    class Actor:
        def call(self, function):
            return function()

    def main():
        global N
        def nested():
            global N
            N += 1
            return os.getpid(), N
        @conveyor.remote
        def by_decorator():
            return count()
        functions = [nested, Service.count, lambda: count()]
        actor = Actor.remote()
        for function in [by_decorator, *map(conveyor.remote, functions)]:
            for where in function, function.options(on=actor):
                found = {}
                for _ in range(5):
                    pid, n = conveyor.get(where.remote())
                    found.setdefault(pid, []).append(n)
                for counted in found.values():
                    assert [n - counted[0] for n in counted] == list(range(len(counted))), found
        # A function with a closure is sent as it is then, with each call and in each value.
        for function in of_factory(), decorated(of_factory()):
            remote = conveyor.remote(function)
            assert [conveyor.get(remote.remote())[1] for _ in range(3)] == [1, 1, 1]
        model = 0
        def modelled():
            return model
        for model in range(3):
            assert conveyor.get(conveyor.remote(modelled).remote()) == model
            assert conveyor.get(actor.call.remote(modelled)) == model
        assert [conveyor.get(actor.call.remote(of_factory()))[1] for _ in range(3)] == [1, 1, 1]
        passed = lambda: N
        found = []
        for N in range(3):
            found.append(conveyor.get(actor.call.remote(passed)))
        assert found == [0, 1, 2], found

    if __name__ == "__main__":
        main()
"""


def test_remote_functions_without_a_name_of_their_own_keep_what_they_refer_to(scripts):
    scripts.run(NESTED)


def test_of_remote_functions_of_the_moment(here):
    actor = Actor.remote()

    def call_with(row):
        def note():
            (watch,) = [obj for obj in gc.get_objects() if type(obj).__name__ == "Watch"]
            return watch.note(row).a

        value = conveyor.put(bytes(100_000))

        def read():
            return len(conveyor.get(value))

        assert conveyor.get(conveyor.remote(read).options(on=actor).remote()) == 100_000
        return conveyor.get(conveyor.remote(note).options(on=actor).remote())

    def without_closure():
        return len(gc.get_objects())

    for _ in range(ROUNDS):
        assert call_with(here.note(new_row())) == 1
    seen = weakref.WeakSet()
    for _ in range(ROUNDS):
        made = types.FunctionType(without_closure.__code__, globals())
        seen.add(made)
        assert conveyor.get(conveyor.remote(made).options(on=actor).remote())
        del made
    gc.collect()
    assert not seen
    nothing_stays(here, actor)
