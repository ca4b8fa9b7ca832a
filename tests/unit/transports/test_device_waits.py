"""Waiting on the host for an event of a device."""

import threading
from typing import Any

import pytest

from conveyor.device.base import happened, wait_until
from conveyor.flag import Flag


class Failed:
    """An event of a device that has failed."""

    def query(self) -> bool:
        raise RuntimeError("an illegal memory access was encountered")


def after(looks: int) -> Any:
    """Whether so many looks have said no."""
    left = iter([False] * looks)
    return lambda: next(left, True)


def test_what_has_happened_costs_one_look_and_no_sleep():
    requested: list[float] = []
    assert wait_until(after(0), requested.append)
    assert requested == []


def test_sleeps_grow_up_to_the_longest():
    requested: list[float] = []
    assert wait_until(after(6), requested.append, first=0.001, longest=0.005)
    assert requested == [0.001, 0.002, 0.004, 0.005, 0.005, 0.005]
    requested.clear()
    assert wait_until(after(2), requested.append, first=1.0, longest=0.005)
    assert requested == [0.005, 0.005]


def test_somebody_ends_it():
    requested: list[float] = []

    def ended(seconds: float) -> bool:
        requested.append(seconds)
        return len(requested) == 3

    assert not wait_until(lambda: False, ended)
    assert len(requested) == 3


def test_what_the_sleep_raises_ends_it():
    def interrupted(_seconds: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        wait_until(lambda: False, interrupted)


def test_an_event_of_a_device_that_has_failed_is_waited_for_no_more():
    assert happened(Failed())
    # Who uses what the event stands for is told.
    with pytest.raises(RuntimeError, match="illegal memory access"):
        wait_until(Failed().query)


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_wait_for_an_event_ends_with_it_or_with_a_flag():
    pytest.importorskip("torch")
    pytest.importorskip("numpy")
    import accelerator

    sim = accelerator.install()
    gate, ended, outcomes = threading.Event(), Flag(), list[bool]()
    accelerator.kernel(0, lambda: gate.wait(30))
    try:
        event = sim.current_stream(0).record()
        assert not happened(event)
        waiting = threading.Thread(
            target=lambda: outcomes.append(wait_until(event.query, ended.wait))
        )
        waiting.start()
        ended.set()
        waiting.join(30)
        assert outcomes == [False]
        gate.set()
        assert wait_until(event.query)
        assert happened(event)
    finally:
        gate.set()
        sim.synchronize(0)
