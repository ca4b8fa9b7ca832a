"""Items of generators that are dropped while another thread looks for some: nobody forgets them."""

import threading
from collections import deque
from types import SimpleNamespace

import pytest

from conveyor.refs.ref import EMPTY
from conveyor.refs.streams import Items


class Reader:
    """A ring with items of executions, in place of a channel's end."""

    def __init__(self, *items):
        self.items = deque(items)
        self.tag = -1
        self.wanted = 0
        self.meanwhile = lambda: None

    @property
    def empty(self):
        return not self.items

    @property
    def front(self):
        return self.items[0][0] if self.items else -1

    def receive(self):
        self.tag, item = self.items.popleft()
        self.meanwhile()
        return item

    def skip(self):
        self.items.popleft()

    def want(self, number):
        self.wanted = number

    def close(self):
        pass


@pytest.fixture
def reader():
    return Reader((0, "a"), (1, "b"), (2, "c"))


@pytest.fixture
def dropped():
    """The executions whose streams the actor knows to be dropped."""
    return []


@pytest.fixture
def items(reader, dropped):
    limits = SimpleNamespace(drop_stream=lambda number, task: dropped.append(number))
    return Items(reader, SimpleNamespace(ring=lambda: None), 0, limits, 0)


def end_from_another_thread(items, number):
    thread = threading.Thread(target=items.end, args=(number,))
    thread.start()
    thread.join()


LOOKS = {
    "take": lambda items: items.take(1),
    "is_there": lambda items: items.is_there(1),
    "close": lambda items: items.close(),
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
@pytest.mark.parametrize("interrupted", [False, True])
def test_one_is_dropped_while_another_thread_looks(items, reader, dropped, look, interrupted):
    def meanwhile():
        reader.meanwhile = lambda: None
        end_from_another_thread(items, 2)
        if interrupted:
            raise KeyboardInterrupt

    reader.meanwhile = meanwhile
    try:
        look(items)
    except KeyboardInterrupt:
        assert interrupted
    assert dropped == [2]


def test_what_comes_behind_the_end_of_a_stream_is_not_given(items, reader):
    """Its graph may have failed while the generator goes on: what was skipped would be missing before it."""
    assert items.take(0) == "a"
    items.end(1)
    reader.items.append((1, "d"))
    assert items.take(1) is EMPTY
    assert not items.is_there(1)
    assert items.take(2) == "c"
