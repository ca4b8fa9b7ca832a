"""Programs and actors that lock their memory, as real-time ones do: the kernel then copies each page of
private mappings, also of those that lie idle for the next value in their place."""

import subprocess
import sys
import textwrap

import pytest

CURRENT, FUTURE, ON_FAULT = 1, 2, 4
COMMON = """
    import ctypes
    import numpy as np
    import conveyor
    from conveyor.dag import InputNode, MultiOutputNode

    SIZES = [64 << 10, 300_000, 1 << 20, 20 << 20]

    def lock(how):
        if ctypes.CDLL(None, use_errno=True).mlockall(how) != 0:
            raise OSError(ctypes.get_errno(), "mlockall")

    def unlock():
        ctypes.CDLL(None).munlockall()

    def full(size, value):
        return np.full(size, value, np.uint8)

    @conveyor.remote
    class Worker:
        def make(self, size, value):
            return full(size, value)

        def look(self, x):
            return int(x.min()), int(x.max())

        def write(self, x):
            x[::4096] = 99

        def call(self, function, *args):
            return function(*args)
"""


def program(body):
    return textwrap.dedent(COMMON) + textwrap.dedent(body)


@pytest.fixture(scope="module", autouse=True)
def _may_lock():
    tries = f"import ctypes, sys; sys.exit(ctypes.CDLL(None).mlockall({CURRENT}) != 0)"
    if subprocess.run([sys.executable, "-c", tries], check=False).returncode:
        pytest.skip("no process may lock its memory here (RLIMIT_MEMLOCK)")


@pytest.mark.parametrize("how", [CURRENT, CURRENT | FUTURE, CURRENT | ON_FAULT])
def test_what_a_program_gets_is_right_after_it_has_locked_its_memory(scripts, how):
    body = f"""
        worker = Worker.remote()
        makes = [
            lambda size, value: conveyor.put(full(size, value)),
            lambda size, value: worker.make.remote(size, value),
        ]

        def check(value):
            for make in makes:
                for size in SIZES:
                    ref = make(size, value)
                    one, other = conveyor.get(ref), conveyor.get(ref)
                    assert (one == value).all() and (other == value).all(), (size, value)
                    one[::5000] = 99
                    assert (other == value).all()
                    assert (conveyor.get(ref) == value).all()
                    del one

        value = 0
        for _ in range(3):
            for step in (lambda: None, lambda: lock({how}), unlock):
                step()
                for _ in range(3):
                    check(value := value + 1)
            # Nothing is locked any more when the next one is got.
            lock({how})
            unlock()
            check(value := value + 1)
        print("done")
    """
    assert scripts.run(program(body)).split() == ["done"]


def test_what_actors_get_is_right_after_they_have_locked_their_memory(scripts):
    body = f"""
        workers = [Worker.remote() for _ in range(2)]
        with InputNode() as inp:
            looks = MultiOutputNode([w.look.bind(inp) for w in workers]).compile()
        with InputNode() as inp:
            writes = MultiOutputNode([w.write.bind(inp) for w in workers]).compile()

        def check(value):
            for size in SIZES:
                seen = conveyor.get(looks.execute(full(size, value)))
                assert seen == [(value, value)] * 2, (size, value, seen)
            conveyor.get(writes.execute(full(SIZES[2], value)))

        value = 0
        for step in (lambda: None, lambda: lock({CURRENT}), unlock):
            conveyor.get([w.call.remote(step) for w in workers])
            for _ in range(4):
                check(value := value + 1)
        print("done")
    """
    assert scripts.run(program(body)).split() == ["done"]
