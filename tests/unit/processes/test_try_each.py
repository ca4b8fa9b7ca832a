"""Steps of an end that are each tried: what one raises keeps nothing of what they end."""

import gc
import weakref

from conveyor.runtime.uninterrupted import try_each


class Instance:
    def items(self):
        try:
            while True:
                yield 1
        finally:
            raise KeyboardInterrupt("the generator's end")


def test_an_interrupt_of_a_generator_that_is_closed_is_in_no_circle(capsys):
    """A collection would close the files of its actor in any order, and a text file may lose its text."""
    instance = Instance()
    items = instance.items()
    next(items)
    gone = weakref.ref(instance)

    def end(items=items):
        items.close()

    del items
    gc.disable()
    try:
        interrupt = try_each(end)
        assert isinstance(interrupt, KeyboardInterrupt)
        del interrupt, end, instance
        assert gone() is None
    finally:
        gc.enable()
    assert "the generator's end" in capsys.readouterr().err
