"""Limits of the system: what is done about them, and what errors say of those that are met."""

import errno

import pytest

import conveyor
from conveyor.exceptions import ConveyorError, SystemLimitError

ACTORS = """
import os, resource, sys
import conveyor

@conveyor.remote
class A:
    def f(self, x):
        return x
    def descriptors(self):
        return len(os.listdir("/proc/self/fd"))
"""


def test_the_soft_limit_of_descriptors_is_raised(scripts):
    scripts.run(
        ACTORS
        + """
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
actors = [A.remote() for _ in range(50)]
assert conveyor.get([a.f.remote(1) for a in actors]) == [1] * 50
soft, now = resource.getrlimit(resource.RLIMIT_NOFILE)
assert now == hard and soft == min(hard, 65536), (soft, hard)
"""
    )


def test_it_is_left_alone_where_that_is_asked_for_and_the_error_says_what_to_do(scripts):
    scripts.run(
        ACTORS
        + """
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
conveyor.init(raise_descriptor_limit=False)
first = A.remote()
assert conveyor.get(first.f.remote(1)) == 1
before = len(os.listdir("/proc/self/fd"))
actors = []
try:
    while True:
        actors.append(A.remote())
except conveyor.exceptions.ConveyorError as error:
    said = str(error)
assert "ulimit -n" in said and "may have 100 descriptors" in said, said
# What was there goes on, and what is let go of makes room.
assert conveyor.get(first.f.remote(2)) == 2
for actor in actors:
    conveyor.kill(actor)
actors.clear()
"""
    )


def test_an_actor_takes_seven_descriptors_of_the_driver(scripts):
    # The number stands in the error's text and in the documentation.
    scripts.run(
        ACTORS
        + """
def used():
    return len(os.listdir("/proc/self/fd"))
first = A.remote()
conveyor.get(first.f.remote(1))
before = used()
actors = [A.remote() for _ in range(10)]
conveyor.get([a.f.remote(1) for a in actors])
assert used() - before == 70, (used() - before) / 10
"""
    )


def test_survivors_keep_no_descriptors_of_the_dead(fresh_session, wait_until):
    @conveyor.remote
    class Survivor:
        def call(self, peer):
            return conveyor.get(peer.ping.remote())

        def ping(self):
            return 1

        def descriptors(self):
            import os

            return len(os.listdir("/proc/self/fd"))

    survivor = Survivor.remote()

    def meet():
        peer = Survivor.remote()
        assert conveyor.get(survivor.call.remote(peer), timeout=20) == 1
        conveyor.kill(peer)

    meet()
    before = conveyor.get(survivor.descriptors.remote())
    for _ in range(5):
        meet()
    wait_until(lambda: conveyor.get(survivor.descriptors.remote()) <= before + 2)


@pytest.mark.parametrize(
    ("limit", "said"),
    [("RLIMIT_FSIZE, (1 << 20, -1)", "ulimit -f"), ("RLIMIT_AS, (300 << 20, -1)", "ulimit -v")],
)
def test_a_session_that_cannot_be_started_says_why(scripts, limit, said):
    scripts.run(
        ACTORS
        + f"""
resource.setrlimit(resource.{limit})
try:
    conveyor.init(arena_bytes=1 << 30)
    A.remote()
except (conveyor.exceptions.ConveyorError, MemoryError) as error:
    assert {said!r} in str(error), error
    print("told")
"""
    )


def test_the_error_is_of_both_families():
    error = SystemLimitError(errno.EMFILE, "cannot start actor A: too many; raise it")
    assert isinstance(error, OSError)
    assert isinstance(error, ConveyorError)
    assert error.errno == errno.EMFILE
    assert str(error).startswith("cannot start actor A")


def test_the_first_error_is_what_comes_out_of_with(fresh_session, monkeypatch):
    @conveyor.remote
    class A:
        def f(self, x):
            return x

    with conveyor.dag.InputNode() as inp:
        graph = A.remote().f.bind(inp).compile(name="unlucky")
    teardown = type(graph).teardown
    monkeypatch.setattr(type(graph), "teardown", lambda self, *a: 1 / 0)
    with pytest.raises(KeyError, match="first") as raised, graph:
        raise KeyError("first")
    notes = getattr(raised.value, "__notes__", ["teardown of unlucky failed"])
    assert any("teardown of unlucky failed" in note for note in notes)
    with pytest.raises(ZeroDivisionError), graph:
        pass
    monkeypatch.setattr(type(graph), "teardown", teardown)
    graph.teardown()


def test_a_working_directory_that_is_gone(scripts):
    scripts.run(
        """
import os, tempfile, warnings
import conveyor

@conveyor.remote
class A:
    def cwd(self):
        return os.getcwd()

folder = tempfile.mkdtemp()
os.chdir(folder)
os.rmdir(folder)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    assert conveyor.get(A.remote().cwd.remote()) == "/"
assert "working directory is gone" in str(told[0].message)
os.chdir("/tmp")
assert conveyor.get(A.remote().cwd.remote()) == "/tmp"
"""
    )
