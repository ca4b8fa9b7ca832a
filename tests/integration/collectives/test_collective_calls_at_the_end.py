"""Ranks that wait in a collective operation when the session ends."""

import os
import threading
import time

import inside
import numpy as np
import pytest
from integration_collectives import await_rank
from integration_helpers import WAIT, hold

import conveyor
from conveyor.exceptions import RuntimeStateError, SessionEndedError
from conveyor.experimental import collective

GRACE = 60.0


@conveyor.remote
class Rank:
    def __init__(self, folder, name):
        self.path = folder / name

    def note(self, text):
        with open(self.path, "a") as file:
            file.write(f"{text}\n")

    def add(self, group, gate=None):
        self.note(os.getpid())
        if gate is not None:
            hold(gate)
        array = np.ones(3)
        try:
            collective.allreduce(array, group)
        except Exception as error:
            self.note(f"{type(error).__name__}: {error}")
            raise
        self.note(array.tolist())

    def sleep(self):
        self.note(os.getpid())
        time.sleep(600)

    def ping(self):
        return "pong"

    def __conveyor_exit__(self):
        self.note("exit")


@pytest.fixture
def told(tmp_path, wait_until):
    """``told(name, n)``: what a rank has noted, once that are ``n`` lines."""

    def read(name, lines):
        path = tmp_path / name
        wait_until(lambda: path.exists() and path.read_text().count("\n") >= lines)
        return path.read_text().splitlines()

    return read


def shut_down():
    """The session; how long that has taken."""
    began = time.monotonic()
    conveyor.shutdown()
    return time.monotonic() - began


def test_who_waits_for_the_driver_is_told_and_ends_in_order(leaves_nothing, tmp_path, told):
    with leaves_nothing():
        conveyor.init(grace_seconds=GRACE)
        rank = Rank.remote(tmp_path, "one")
        collective.create_collective_group([rank], name="ours", driver_rank=0)
        ref = rank.add.remote("ours")
        await_rank(rank, ref)
        assert shut_down() < GRACE / 4
        _, error, last = told("one", 3)
        assert (
            "CollectiveBrokenError: allreduce of collective group 'ours': the session ends" in error
        )
        assert last == "exit"
        del ref


def test_who_waits_in_a_circle_is_told_and_ends_in_order(leaves_nothing, tmp_path, told):
    with leaves_nothing():
        conveyor.init(grace_seconds=GRACE)
        ranks = [Rank.remote(tmp_path, name) for name in ("one", "two", "three")]
        for number in range(3):
            collective.create_collective_group(
                [ranks[number], ranks[(number + 1) % 3]], name=f"{number}"
            )
        refs = [rank.add.remote(f"{number}") for number, rank in enumerate(ranks)]
        for rank, ref in zip(ranks, refs, strict=True):
            await_rank(rank, ref)
        assert shut_down() < GRACE / 4
        for name in ("one", "two", "three"):
            _, error, last = told(name, 3)
            assert "CollectiveBrokenError" in error
            assert last == "exit"
        del refs, ref


def test_a_circle_that_is_completed_when_the_end_has_begun(leaves_nothing, tmp_path, told, latches):
    """The one that completes it comes to its operation when the driver has looked for circles."""
    with leaves_nothing():
        conveyor.init(grace_seconds=GRACE)
        ranks = [Rank.remote(tmp_path, name) for name in ("one", "two")]
        for name in ("ours", "theirs"):
            collective.create_collective_group(ranks, name=name)
        go = latches()
        refs = [ranks[0].add.remote("ours"), ranks[1].add.remote("theirs", go.path)]
        await_rank(ranks[0], refs[0])
        told("two", 1)

        def open_at_the_end():
            with pytest.raises(SessionEndedError):
                refs[1].get()
            go.open()

        thread = threading.Thread(target=open_at_the_end)
        thread.start()
        assert shut_down() < GRACE / 4
        thread.join()
        for name in ("one", "two"):
            _, error, last = told(name, 3)
            assert "the session ends" in error
            assert last == "exit"


def test_an_operation_whose_other_ranks_still_run_is_finished(
    leaves_nothing, tmp_path, told, latches
):
    with leaves_nothing():
        conveyor.init(grace_seconds=GRACE)
        ranks = [Rank.remote(tmp_path, name) for name in ("one", "two")]
        collective.create_collective_group(ranks, name="ours")
        go = latches()
        refs = [ranks[0].add.remote("ours"), ranks[1].add.remote("ours", go.path)]
        await_rank(ranks[0], refs[0])
        told("two", 1)

        def open_at_the_end():
            with pytest.raises(SessionEndedError):
                refs[1].get()
            go.open()

        thread = threading.Thread(target=open_at_the_end)
        thread.start()
        conveyor.shutdown()
        thread.join()
        for name in ("one", "two"):
            assert told(name, 3)[1:] == ["[2.0, 2.0, 2.0]", "exit"]


def test_who_waits_for_what_does_not_end_has_time_for_its_own_end(leaves_nothing, tmp_path, told):
    with leaves_nothing():
        conveyor.init(grace_seconds=5)  # at half of which it is told: the rest is for its end
        ranks = [Rank.remote(tmp_path, name) for name in ("one", "two")]
        collective.create_collective_group(ranks, name="ours")
        refs = [ranks[0].add.remote("ours"), ranks[1].sleep.remote()]
        await_rank(ranks[0], refs[0])
        told("two", 1)
        conveyor.shutdown()
        _, error, last = told("one", 3)
        assert "the session ends" in error
        assert last == "exit"
        assert len(told("two", 1)) == 1  # killed
        del refs


def test_a_thread_of_the_driver_is_told_that_the_session_has_ended(
    leaves_nothing, tmp_path, wait_until
):
    with leaves_nothing():
        conveyor.init()
        rank = Rank.remote(tmp_path, "one")
        collective.create_collective_group([rank], name="ours", driver_rank=0)
        errors = []

        def wait():
            try:
                collective.allreduce(np.ones(3), "ours")
            except Exception as error:
                errors.append(type(error))  # it refers to what must be gone

        thread = threading.Thread(target=wait)
        thread.start()
        wait_until(lambda: None in inside.sleeping())
        conveyor.shutdown()
        thread.join(WAIT)
        assert errors == [SessionEndedError]


def test_after_the_session_there_is_none(leaves_nothing, tmp_path):
    with leaves_nothing():
        conveyor.init()
        conveyor.shutdown()
        with pytest.raises(RuntimeStateError, match="there is no session: it has been shut down"):
            collective.barrier("ours")


@conveyor.remote
class Forks:
    def fork(self):
        reads, writes = os.pipe()
        if (pid := os.fork()) == 0:
            try:
                collective.barrier("ours")
            except Exception as error:
                os.write(writes, f"{type(error).__name__}: {error}".encode())
            os._exit(0)
        os.close(writes)
        with os.fdopen(reads) as file:
            text = file.read()
        os.waitpid(pid, 0)
        return text


def test_a_forked_child_is_told_whose_groups_they_are(local):
    actor = Forks.remote()
    collective.create_collective_group([actor], name="ours")
    text = conveyor.get(actor.fork.remote(), timeout=WAIT)
    assert text.startswith("RuntimeStateError: this process was forked from one of a session")
