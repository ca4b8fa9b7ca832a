"""Actors whose last handle is gone, and that have something to do still."""

import asyncio
import os
import time

import pytest
from integration_helpers import get

import conveyor


def wait_for(go):
    """Sleep until somebody opens the pipe for writing."""
    with open(go):
        return True


class Busy:
    def work(self, go):
        return wait_for(go)

    def pid(self):
        return os.getpid()


class AsyncBusy:
    async def work(self, go):
        return await asyncio.to_thread(wait_for, go)

    async def pid(self):
        return os.getpid()


def processor(pid):
    """Seconds of it that the process has had."""
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("kind", [Busy, AsyncBusy])
def test_they_wait_for_it_asleep(local, tmp_path, kind):
    options = {"max_concurrency": 2} if kind is Busy else {}
    actor = conveyor.remote(kind).options(**options).remote()
    pid, go = get(actor.pid.remote()), str(tmp_path / "go")
    os.mkfifo(go)
    work = actor.work.remote(go)
    del actor
    time.sleep(0.1)  # it has heard of that, mostly; if not, it sleeps as well
    before = processor(pid)
    time.sleep(0.5)
    assert processor(pid) - before < 0.1
    os.close(os.open(go, os.O_WRONLY))
    assert get(work)
