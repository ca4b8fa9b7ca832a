"""The thread on which futures of refs are told that these are done."""

import threading

from conveyor.runtime.waiting.completions import Completions


def test_a_signal_handler_may_put_something_in_the_middle_of_that():
    completions, told = Completions(), threading.Event()

    def interrupted():
        with completions._lock:
            completions.put(told.set)

    threading.Thread(target=interrupted, daemon=True).start()
    assert told.wait(60)


def test_what_raises_keeps_nothing_back(caplog):
    def raises():
        raise SystemExit(3)

    completions, told = Completions(), threading.Event()
    completions.put(raises)
    completions.put(told.set)
    assert told.wait(60)
    assert "what comes after a reference is done has failed" in caplog.text
