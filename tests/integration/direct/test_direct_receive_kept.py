"""What a method receives into its own memory is kept until it has: no longer, and no less."""

import threading

import numpy as np
from integration_helpers import WAIT, get, hold

import conveyor
from conveyor.direct.store import TABLE


@conveyor.remote
class Trainer:
    @conveyor.method(tensor_transport="auto")
    def array(self, size=3):
        return np.arange(float(size))

    def stored(self):
        return len(TABLE.all())


@conveyor.remote
class Generator:
    def __init__(self):
        self.buffer = np.zeros(3)

    @conveyor.method(receive_into={"array": "buffer"})
    def take(self, array, more=None, path=None):
        if path is not None:
            hold(path)
        return array is self.buffer, self.buffer.tolist()

    def hold(self, path):
        hold(path)


class Noted:
    """It makes a file where it is decoded."""

    def __init__(self, path):
        self.path = path

    def __setstate__(self, state):
        open(state["path"], "w").close()


@conveyor.remote(max_concurrency=2)
class Both:
    """It keeps values, and has two threads for its calls beside the one that receives them."""

    @conveyor.method(tensor_transport="auto")
    def array(self):
        return np.arange(3.0)

    def stored(self):
        return len(TABLE.all())

    def get_meanwhile(self, refs, begun, got):
        hold(begun)
        total = get(refs.pop()).sum()
        open(got, "w").close()
        return float(total)

    def hold(self, _argument, path):
        hold(path)


class Slow:
    """Its decoding begins, and ends when it may."""

    def __init__(self, begun, end):
        self.paths = begun, end

    def __reduce__(self):
        return _decode_slowly, self.paths


def _decode_slowly(begun, end):
    open(begun, "w").close()
    hold(end)


def test_a_call_keeps_nothing_that_another_thread_gets_while_it_is_received(
    local, tmp_path, wait_until
):
    both = Both.remote()
    begun, got, go = (str(tmp_path / name) for name in ("begun", "got", "go"))
    ref = both.array.remote()
    total = both.get_meanwhile.remote([ref], begun, got)
    del ref
    holding = both.hold.remote(Slow(begun, got), go)
    assert get(total) == 3
    wait_until(lambda: get(both.stored.remote()) == 0, WAIT)
    (tmp_path / "go").touch()
    get(holding)


def test_it_is_kept_until_it_has_been_received(local, tmp_path, wait_until):
    trainer, generator = Trainer.remote(), Generator.options(max_concurrency=2).remote()
    holding = [generator.hold.remote(str(tmp_path / "go")) for _ in range(2)]
    # Its reference is gone at once. The actor has the call, which waits for a thread.
    taken = generator.take.remote(trainer.array.remote(), Noted(str(tmp_path / "decoded")))
    wait_until((tmp_path / "decoded").exists, WAIT)
    other = trainer.array.remote()
    assert get(trainer.stored.remote()) == 2
    del other
    wait_until(lambda: get(trainer.stored.remote()) == 1, WAIT)
    (tmp_path / "go").touch()
    get(holding)
    assert get(taken) == (True, [0, 1, 2])
    wait_until(lambda: get(trainer.stored.remote()) == 0, WAIT)


def test_it_is_let_go_of_while_the_method_runs(local, tmp_path, wait_until):
    trainer, generator = Trainer.remote(), Generator.remote()
    path = str(tmp_path / "go")
    taken = generator.take.remote(trainer.array.remote(), path=path)
    wait_until(lambda: get(trainer.stored.remote()) == 0, WAIT)
    (tmp_path / "go").touch()
    assert get(taken) == (True, [0, 1, 2])


def test_many_at_a_time(local, wait_until):
    trainer, generator = Trainer.remote(), Generator.remote()

    def go():
        for _ in range(30):
            assert get(generator.take.remote(trainer.array.remote()))[0]

    threads = [threading.Thread(target=go) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    wait_until(lambda: get(trainer.stored.remote()) == 0, WAIT)
