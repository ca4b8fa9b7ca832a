"""What a process has put, and gets itself: private pages over the value, which nobody else sees."""

import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from integration_helpers import get

import conveyor

pytestmark = pytest.mark.usefixtures("session")

MB = 1 << 20
SIZES = [1000, 64 << 10, MB, 24 * MB]


def full(value, size):
    return np.full(size // 8, float(value))


def shared_memory():
    """Bytes of files that this process has in memory: what lies in arenas."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssShmem:"):
            return int(line.split()[1]) << 10
    raise AssertionError("the kernel does not say")


@conveyor.remote
class Worker:
    def total(self, x):
        return float(x.sum())

    def puts(self, size):
        ref = conveyor.put(full(3, size))
        mine = conveyor.get(ref)
        mine[:] = 5
        return [ref, float(mine[-1]), float(conveyor.get(ref)[-1])]


@pytest.mark.parametrize("size", SIZES)
def test_what_is_got_is_its_readers_to_write(size):
    given = full(1, size)
    ref = conveyor.put({"a": given, "b": [given[:50]]})
    given[:] = 7
    for _ in range(3):
        one, other = get(ref), get(ref)
        assert (one["a"] == 1).all()
        assert (one["b"][0] == 1).all()
        one["a"][:] = 2
        one["b"][0][:] = 3
        assert (one["a"] == 2).all()
        assert (other["a"] == 1).all()
        assert (other["b"][0] == 1).all()
    worker = Worker.remote()
    assert get(worker.total.remote(conveyor.put(get(ref)["a"]))) == size // 8


@pytest.mark.parametrize("size", SIZES)
def test_what_is_got_outlives_its_ref(size):
    ref = conveyor.put(full(1, size))
    held = [get(ref), get(ref)]
    held[0][::100] = 2
    del ref
    for i in range(10):
        assert (get(conveyor.put(full(i, size))) == i).all()
    assert (held[0][::100] == 2).all()
    assert (held[1] == 1).all()
    del held[0]
    assert (get(conveyor.put(full(9, size))) == 9).all()
    assert (held[0] == 1).all()


@pytest.mark.parametrize("size", SIZES)
def test_in_an_actor(size):
    ref, written, kept = get(Worker.remote().puts.remote(size))
    assert (written, kept) == (5, 3)
    assert (get(ref) == 3).all()


def test_thousands_of_values(opened_since):
    opened = opened_since()
    refs = [conveyor.put(full(i, 64 << 10)) for i in range(4000)]
    values = [get(ref) for ref in refs]
    for value in values[::2]:
        value += 0.5
    assert all(value[0] == value[-1] == i + (i % 2 == 0) / 2 for i, value in enumerate(values))
    assert all(get(ref)[7] == i for i, ref in enumerate(refs))
    assert len(opened()) < 10


def test_threads_have_values_of_their_own():
    wrong = []

    def work(mark):
        for i in range(100):
            value = get(conveyor.put(full(mark + i, MB)))
            value[:500] = -1
            if not ((value[:500] == -1).all() and (value[500:] == mark + i).all()):
                wrong.append((mark, i))

    threads = [threading.Thread(target=work, args=(1000 * k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


class Ticks:
    """A thread that notes when it runs."""

    def __enter__(self):
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(0.0005)
        self._times = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def _run(self):
        while not self._ended.wait(0.0002):
            self._times.append(time.perf_counter())

    def part_stood_still(self, work):
        """Run ``work``, and return for how much of its time the thread did not run at a stretch."""
        started = time.perf_counter()
        work()
        ended = time.perf_counter()
        times = [started, *(t for t in self._times if started < t < ended), ended]
        return max(b - a for a, b in pairwise(times)) / (ended - started)

    def __exit__(self, *_):
        self._ended.set()
        self._thread.join()
        sys.setswitchinterval(self._interval)


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.ones(128 * MB, np.uint8),
        lambda: bytes(128 * MB),
        lambda: {"a": [np.ones(64 * MB, np.uint8)], "b": np.ones((64, MB), np.uint8)},
        lambda: "x" * (128 * MB),
    ],
    ids=["array", "bytes", "dict", "text"],
)
def test_other_threads_run_while_a_value_is_put(make):
    value = make()
    get(conveyor.put(value))
    with Ticks() as ticks:
        # Others may have the cores meanwhile, so not each time.
        assert any(ticks.part_stood_still(lambda: conveyor.put(value)) < 0.5 for _ in range(20)), (
            "the thread stood still as long as a value was put"
        )


def test_threads_put_one_value_at_the_same_time():
    given = full(7, 4 * MB)
    wrong = []

    def work():
        for _ in range(20):
            value = get(conveyor.put({"a": given, "b": given[:1000]}))
            value["b"][:] = 1
            if not (value["a"] == 7).all():
                wrong.append(value)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert (given == 7).all()


def test_forks_and_the_programs_end_while_threads_put(scripts):
    program = """
        import os
        import threading
        import time
        import numpy as np
        import conveyor

        conveyor.put(1)
        wrong, count = [], [0]

        def work(mark):
            while True:
                value = np.full(3 << 20, mark, np.uint8)
                got = conveyor.get(conveyor.put(value))
                if not (got == mark).all():
                    wrong.append(mark)
                count[0] += 1

        for mark in (1, 2):
            threading.Thread(target=work, args=(mark,), daemon=True).start()
        for _ in range(2):
            seen = count[0]
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    conveyor.init()
                    for size in (3 << 20, 300_000):
                        assert (conveyor.get(conveyor.put(np.full(size, 9, np.uint8))) == 9).all()
                    conveyor.shutdown()
                    code = 0
                finally:
                    os._exit(code)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == 0
            while count[0] == seen:
                time.sleep(0.001)
        assert not wrong
        print("done")
    """
    assert scripts.run(program).split() == ["done"]


def test_memory_goes_back_with_the_last_who_has_it(wait_until):
    before = shared_memory()  # of what other tests still hold, too
    refs = [conveyor.put(full(i, 100 * MB)) for i in range(8)]
    held = get(refs[0])
    assert shared_memory() > 800 * MB
    del refs
    assert (
        shared_memory() < before + 700 * MB
    )  # what stays warm for the next ones, and what is held
    wait_until(lambda: shared_memory() < before + 110 * MB, 30, "all but what is held")
    assert shared_memory() >= 100 * MB
    assert (held == 0).all()
    del held
    wait_until(lambda: shared_memory() < before + 8 * MB, 30, "the rest")


def test_what_is_got_outlives_the_session(scripts):
    program = """
        import numpy as np
        import conveyor

        ref = conveyor.put(np.ones(1 << 18))
        held = conveyor.get(ref)
        conveyor.shutdown()
        held[:9] = 2
        assert held.sum() == (1 << 18) + 9
        del ref
        for i in range(3):
            assert (conveyor.get(conveyor.put(np.full(1 << 18, i))) == i).all()
            conveyor.shutdown()
        assert held.sum() == (1 << 18) + 9
        print("done")
    """
    assert scripts.run(program).split() == ["done"]


def test_no_cap_keeps_a_value_from_being_put(scripts):
    program = """
        import numpy as np
        import conveyor

        conveyor.init(arena_bytes=16 << 20)
        held = conveyor.empty(15 << 17)
        refs = [conveyor.put(np.full(1 << 20, float(i))) for i in range(20)]  # 8 MiB each
        values = [conveyor.get(ref) for ref in refs]
        assert all((value == i).all() for i, value in enumerate(values))
        try:
            conveyor.empty(2 << 17)
        except conveyor.exceptions.ArenaFullError:
            print("full")
    """
    assert scripts.run(program).split() == ["full"]


def test_a_forked_child_has_what_it_has_inherited(scripts):
    program = """
        import os
        import numpy as np
        import conveyor

        def full(i):
            return np.full(1 << 18, float(i))

        refs = [conveyor.put(full(i)) for i in range(8)]
        held = [conveyor.get(ref) for ref in refs]
        out, into = os.pipe()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.close(into)
                os.read(out, 1)  # the parent has let go of its own, and put others
                assert all((x == i).all() for i, x in enumerate(held))
                for x in held:
                    x[:] = -1
                del held, x
                conveyor.init()
                assert (conveyor.get(conveyor.put(full(77))) == 77).all()
                conveyor.shutdown()
                code = 0
            finally:
                os._exit(code)
        del held
        assert all((conveyor.get(ref) == i).all() for i, ref in enumerate(refs))
        del refs
        others = [conveyor.put(full(100 + i)) for i in range(30)]
        os.close(into)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert all((conveyor.get(ref) == 100 + i).all() for i, ref in enumerate(others))
        print("done")
    """
    assert scripts.run(program).split() == ["done"]
    assert "Traceback" not in scripts.stderr, scripts.stderr
