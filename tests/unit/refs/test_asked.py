"""What is asked about a ref on behalf of another process."""

import gc
import weakref

from conveyor.runtime.wait_graph import tell_another


class Asked:
    def __init__(self):
        self.again = None

    def __call__(self, question, again):
        if self.again is None:
            self.again = again
            return None
        self.again = None
        return ((question, 0, "somebody"),)


def test_nothing_of_it_is_kept_when_it_is_answered():
    """Garbage collection may be far away, and whoever waits until a value is free waits for it."""
    told = []
    asked = Asked()
    gone = weakref.ref(asked)
    gc.disable()
    try:
        tell_another(asked, 7, told.append)
        assert not told
        asked.again()
        assert told == [((7, 0, "somebody"),)]
        del asked
        assert gone() is None
    finally:
        gc.enable()
