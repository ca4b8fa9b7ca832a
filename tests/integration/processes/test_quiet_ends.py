"""Actors whose last handle is gone, and that have something to do still."""

import asyncio
import os
import time

import pytest
from integration_helpers import get

import conveyor


def wait_for(inside, go):
    """Say so, and sleep until somebody opens the pipe for writing."""
    inside.touch()
    with open(go):
        return True


class Busy:
    def work(self, inside, go):
        return wait_for(inside, go)

    def pid(self):
        return os.getpid()


class AsyncBusy:
    async def work(self, inside, go):
        return await asyncio.to_thread(wait_for, inside, go)

    async def pid(self):
        return os.getpid()


def processor(pid):
    """Seconds of it that the process has had."""
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("kind", [Busy, AsyncBusy])
def test_they_wait_for_it_asleep(local, tmp_path, wait_until, kind):
    options = {"max_concurrency": 2} if kind is Busy else {}
    actor = conveyor.remote(kind).options(**options).remote()
    pid, inside, go = get(actor.pid.remote()), tmp_path / "inside", str(tmp_path / "go")
    os.mkfifo(go)
    work = actor.work.remote(inside, go)
    del actor
    wait_until(inside.exists)

    def sleeps():
        before = processor(pid)
        time.sleep(0.5)
        return processor(pid) - before < 0.1

    # Not from the first moment on: it hears of its end, and imports what it needs for that.
    wait_until(sleeps)
    os.close(os.open(go, os.O_WRONLY))
    assert get(work)
