"""Ctrl-C in the midst of what is enqueued on the simulated accelerator holds up nobody."""

import threading

import pytest
from interrupted import WAIT, goes_on, interrupted_when_entered

pytest.importorskip("torch")

import accelerator

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::UserWarning")]


def test_a_stream_of_the_simulated_accelerator_goes_on():
    stream, go = accelerator.install().current_stream(0), threading.Event()
    stream.enqueue("hold", lambda: go.wait(WAIT))  # its thread is there
    try:
        with interrupted_when_entered():
            stream.enqueue("nothing", lambda: None)
    except KeyboardInterrupt:
        pass
    go.set()
    assert goes_on(stream.synchronize)
