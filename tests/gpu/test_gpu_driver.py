"""What CUDA's driver does between processes by itself, and what its calls cost."""

from __future__ import annotations

import os
import pickle
import signal
import statistics
import subprocess
import sys
import time

import pytest

from conveyor import device as devices
from conveyor.device import cuda as cuda_memory

torch = pytest.importorskip("torch")

MIB = 1 << 20

#: What each process of a test begins with: words to and from the test, one a line.
HEAD = """
import os, pickle, sys, time, torch
from conveyor import device as devices

cuda = devices.get("cuda")
tensor = torch.zeros(32 << 20, dtype=torch.uint8, device="cuda")

def say(value):
    sys.stdout.buffer.write(pickle.dumps(value))
    sys.stdout.flush()

def hear():
    return pickle.load(sys.stdin.buffer)
"""


class Peer:
    """Another process, which runs a program."""

    def __init__(self, program, **environment):
        self._process = subprocess.Popen(
            [sys.executable, "-c", HEAD + program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **environment},
        )

    def say(self, value):
        self._process.stdin.write(pickle.dumps(value))
        self._process.stdin.flush()

    def hear(self):
        return pickle.load(self._process.stdout)

    def kill(self):
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def close(self):
        self.kill()
        self._process.stdin.close()
        self._process.stdout.close()


@pytest.fixture
def peer():
    made = []

    def start(program, **environment):
        made.append(Peer(program, **environment))
        return made[-1]

    yield start
    for one in made:
        one.close()


def happens(query, seconds=10):
    """Whether something happens within so many seconds, and after how many."""
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        if query():
            return f"after {(time.perf_counter() - begin) * 1e3:.0f} ms"
        time.sleep(0.001)
    return None


KILLED = """
event = cuda.new_event(0, interprocess=True)
torch.cuda._sleep(int(120e9))
event.record(cuda.current_stream(0))
say((cuda.export_memory(tensor), event.handle()))
hear()
"""

WAITS = """
memory, handle = hear()
opened, event = cuda.open_memory(memory), cuda.open_event(handle)
side, other = cuda.new_stream(0), cuda.new_stream(0)
side.wait_event(event)
target = torch.empty_like(tensor)
with cuda.using(side):
    cuda.copy(target, opened)
behind = side.record()
say((event.query(), behind.query()))
hear()
begin = time.perf_counter()
told = [None, None, None]
try:
    with cuda.using(other):
        torch.ones(1000, device="cuda").sum()
    beside = other.record()
    while time.perf_counter() - begin < 3 and None in told:
        for place, one in enumerate((event, behind, beside)):
            if told[place] is None and one.query():
                told[place] = time.perf_counter() - begin
        time.sleep(0.001)
    say((told, None))
except Exception as error:
    say((told, f"{type(error).__name__}: {error}"))
hear()
"""


def test_an_event_of_a_process_that_is_killed(peer, record):
    """Whether a stream that waits for it goes on, and whether others of the waiting process do."""
    killed, waits = peer(KILLED), peer(WAITS)
    waits.say(killed.hear())
    assert waits.hear() == (False, False)
    killed.kill()
    waits.say("it has ended")
    (event, behind, other), result = waits.hear()

    def shown(seconds):
        return "does not within 3 s" if seconds is None else f"does after {seconds * 1e3:.0f} ms"

    record("the event of a process that was killed happens", shown(event))
    record("a stream that waits for it goes on", shown(behind))
    record("another stream of that process goes on", shown(other))
    assert result is None


WRITES = """
freed = cuda.export_memory(tensor)
tensor.fill_(1)
torch.cuda.synchronize()
say(freed)
hear()
address = tensor.data_ptr()
del tensor
torch.cuda.empty_cache()
tensor = torch.full((32 << 20,), 2, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
say((cuda.export_memory(tensor), tensor.data_ptr() == address))
hear()
"""


def test_memory_that_is_opened_twice_and_made_anew(peer, record):
    cuda = devices.get("cuda")
    writes = peer(WRITES)
    first = writes.hear()
    one, two = cuda.open_memory(first), cuda.open_memory(first)
    assert int(one[0]) == int(two[-1]) == 1
    record("memory that is opened twice lies at one address", one.data_ptr() == two.data_ptr())
    del one
    assert int(two[0]) == 1
    writes.say("free it, and make other memory")
    second, same_address = writes.hear()
    record("memory that is made anew lies at the same address there", same_address)
    record("its handle is the same", pickle.loads(first)[1] == pickle.loads(second)[1])
    assert int(two[0]) == 1  # what is open here outlives that
    try:
        three = cuda.open_memory(second)
        record("it is opened while the former is open", int(three[0]) == 2)
    except RuntimeError as error:
        record("it is opened while the former is open", str(error))
        del two
        three = cuda.open_memory(second)
        assert int(three[0]) == 2
    writes.kill()
    assert int(three[0]) == 2  # and what has opened it keeps it from going
    del three
    try:
        told = f"opened, {int(cuda.open_memory(second)[0])}"
    except RuntimeError as error:
        told = str(error)
    record("memory of a process that was killed", told)


def test_memory_of_expandable_segments(peer, record):
    made = peer(
        """
try:
    say(bool(cuda.export_memory(tensor)))
except RuntimeError as error:
    say(str(error))
""",
        PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True",
        PYTORCH_ALLOC_CONF="expandable_segments:True",
    )
    told = made.hear()
    record("memory of expandable segments is exported", told)
    assert told is not True


EVENTS = """
event = cuda.new_event(0, interprocess=True)
event.record(cuda.current_stream(0))
small = torch.zeros(100, device="cuda")
say((cuda.export_memory(tensor), cuda.export_memory(small), event.handle()))
hear()
"""


def timed(function, before=tuple, count=100):
    """The median of what a call takes, in microseconds; ``before`` makes its arguments."""
    times = []
    for _ in range(count):
        arguments = before()
        begin = time.perf_counter_ns()
        function(*arguments)
        times.append(time.perf_counter_ns() - begin)
    return statistics.median(times) / 1e3


def test_what_the_calls_cost(peer, record):
    cuda = devices.get("cuda")
    large, small, handle = peer(EVENTS).hear()
    mine = torch.zeros(1000, device="cuda")
    stream, recorded = cuda.current_stream(0), cuda.new_event(0, interprocess=True)
    recorded.record(stream)
    pinned = cuda.empty_pinned(MIB)
    _, packed, offset, nbytes = pickle.loads(large)
    here, held = torch.zeros(4096, dtype=torch.uint8, device="cuda"), []

    def use():
        with cuda.using(stream):
            pass

    costs = {
        "viable()": timed(cuda.viable),
        "identity()": timed(lambda: cuda.identity(0)),
        "current_stream()": timed(lambda: cuda.current_stream(0)),
        "using(stream)": timed(use),
        "an event is made and recorded": timed(lambda: cuda.new_event(0).record(stream)),
        "an event is recorded again": timed(lambda: recorded.record(stream)),
        "an interprocess event is made and recorded": timed(
            lambda: held.append(cuda.new_event(0, interprocess=True)) or held[-1].record(stream)
        ),
        "an interprocess event goes": timed(held.pop),
        "an event's handle": timed(recorded.handle),
        "an event is opened": timed(lambda: held.append(cuda.open_event(handle, 0))),
        "an opened event goes": timed(held.pop),
        "an event is asked": timed(recorded.query),
        "memory is exported": timed(lambda: cuda.export_memory(mine)),
        "32 MiB are opened": timed(
            lambda: held.append(cuda_memory.Opened(0, packed, offset, nbytes)), count=1
        ),
        "the same again, while they are": timed(
            lambda: held.append(cuda_memory.Opened(0, packed, offset, nbytes))
        ),
        "that is closed": timed(held.pop, count=100),
        "the last is closed": timed(held.pop, count=1),
        "32 MiB are opened and closed": timed(
            lambda: cuda_memory.Opened(0, packed, offset, nbytes), count=20
        ),
        "little memory is opened as a tensor and closed": timed(
            lambda: cuda.open_memory(small), count=20
        ),
        "memory of the device is made": timed(lambda: cuda.empty(4096, 0)),
        "pinned memory is made": timed(lambda: cuda.empty_pinned(4096)),
        "4 KiB are copied, enqueued": timed(lambda: cuda.copy(pinned[:4096], here)),
        "4 KiB are filled and waited for": timed(lambda: (mine.fill_(1), stream.synchronize())),
    }
    for what, cost in costs.items():
        record(what, f"{cost:.1f} us")


def test_memory_that_is_opened_beside_other_work(peer, record):
    """Whether a fetch waits for kernels of other streams of its process, which take 0.4 s here."""
    cuda = devices.get("cuda")
    large, _, handle = peer(EVENTS).hear()
    _, packed, offset, nbytes = pickle.loads(large)
    side = cuda.new_stream(0)
    held = [cuda_memory.Opened(0, packed, offset, nbytes)]
    calls = {
        "memory is opened that is open": lambda: held.append(
            cuda_memory.Opened(0, packed, offset, nbytes)
        ),
        "memory is closed that is open twice": held.pop,
        "memory is closed": held.pop,
        "memory is opened": lambda: held.append(cuda_memory.Opened(0, packed, offset, nbytes)),
        "an interprocess event is made and goes": lambda: cuda.new_event(
            0, interprocess=True
        ).record(cuda.current_stream(0)),
        "an event is opened and goes": lambda: cuda.open_event(handle, 0),
        "memory of the device is made and goes to the card": lambda: (
            torch.empty(256 * MIB, dtype=torch.uint8, device="cuda"),
            torch.cuda.empty_cache(),
        ),
    }
    for what, call in calls.items():
        with cuda.using(side):
            torch.cuda._sleep(int(0.4 * 2e9))
        begin = time.perf_counter()
        call()
        took = time.perf_counter() - begin
        waited = "has waited for it" if side.query() else "has not"
        record(f"{what} beside a kernel", f"{took * 1e3:.2f} ms: {waited}")
        side.synchronize()


PONG = """
theirs, mine = hear(), cuda.new_event(0, interprocess=True)
mine.record(cuda.current_stream(0))
say(mine.handle())
memory, filled = cuda.open_memory(theirs[0]), cuda.open_event(theirs[1])
stream = cuda.current_stream(0)
target = torch.zeros(4096, dtype=torch.uint8, device="cuda")
while hear() == "go":
    stream.wait_event(filled)
    cuda.copy(target, memory[:4096])
    mine.record(stream)
    say("enqueued")
    stream.synchronize()
    say("done")
"""


def test_how_long_a_device_takes_from_one_process_to_another(peer, record):
    """A copy, an event, and a copy behind it in another process, with nothing else between them than words
    through pipes. The GPU has to turn from the one process to the other meanwhile."""
    cuda = devices.get("cuda")
    pong = peer(PONG)
    source = torch.zeros(4096, dtype=torch.uint8, device="cuda")
    stream, filled = cuda.current_stream(0), cuda.new_event(0, interprocess=True)
    filled.record(stream)
    pong.say((cuda.export_memory(source), filled.handle()))
    read = cuda.open_event(pong.hear(), 0)
    words, whole, wait = [], [], []
    for number in range(60):
        begin = time.perf_counter_ns()
        source.fill_(number)
        filled.record(stream)
        pong.say("go")
        assert pong.hear() == "enqueued"
        enqueued = time.perf_counter_ns()
        assert pong.hear() == "done"
        done = time.perf_counter_ns()
        stream.wait_event(read)
        stream.synchronize()
        words.append(enqueued - begin)
        whole.append(done - begin)
        wait.append(time.perf_counter_ns() - done)
    pong.say("end")
    for what, times in {
        "4 KiB from process to process: until the copy is enqueued there": words,
        "4 KiB from process to process: until it is done": whole,
        "an event of another process that has happened is waited for": wait,
    }.items():
        record(what, f"{statistics.median(times[10:]) / 1e3:.0f} us")
