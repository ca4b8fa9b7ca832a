import os
import threading

import pytest

from conveyor.engines.local.resources import GpuPool, visible_gpus
from conveyor.exceptions import ActorStartError, ConveyorError


@pytest.mark.parametrize(
    ("value", "ids"),
    [
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("0", ("0",)),
        ("2,0", ("2", "0")),
        (" 1 , 3 ", ("1", "3")),
        ("0,-1,1", ("0",)),
        ("0,0,1", ("0", "1")),
        ("GPU-8932f937-d72c,MIG-12ab", ("GPU-8932f937-d72c", "MIG-12ab")),
    ],
)
def test_the_variable_decides(value, ids):
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": value}) == ids


def test_device_files_are_counted(tmp_path):
    for name in ("nvidia3", "nvidia10", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert visible_gpus({}, str(tmp_path)) == ("0", "1")
    assert visible_gpus({}, str(tmp_path / "gone")) == ()


def test_of_this_process(monkeypatch):
    monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", "3,5")
    assert GpuPool().ids == ("3", "5")


def test_whole_gpus():
    pool = GpuPool(["a", "b", "c"])
    assert pool.acquire(0) == ()
    assert pool.acquire(2) == ("a", "b")
    assert pool.acquire(1.0) == ("c",)
    pool.release(("a", "b"), 2)
    assert pool.acquire(1) == ("a",)


def test_fractions_share_one_gpu():
    pool = GpuPool(["a", "b"])
    assert pool.acquire(0.25) == ("a",)
    assert pool.acquire(0.5) == ("a",)
    assert pool.acquire(0.5) == ("b",)
    assert pool.acquire(0.25) == ("a",)  # the fullest on which it fits
    with pytest.raises(ActorStartError):
        pool.acquire(1)
    pool.release(("b",), 0.5)
    assert pool.acquire(1) == ("b",)


@pytest.mark.parametrize("count", [3, 6, 7, 10, 100])
def test_equal_shares_fit(count):
    pool = GpuPool(["a"])
    for _ in range(count):
        assert pool.acquire(1 / count) == ("a",)
    for _ in range(count):
        pool.release(("a",), 1 / count)
    assert pool.acquire(1) == ("a",)


def test_a_shortage_says_what_was_requested_and_what_is_there():
    pool = GpuPool(["0", "1"])
    pool.acquire(0.5)
    with pytest.raises(ActorStartError, match=r"num_gpus=2 asked.*GPU 0: 0\.5 free, GPU 1: 1 free"):
        pool.acquire(2)
    with pytest.raises(ConveyorError, match=r"num_gpus=1 asked, but no GPU is visible"):
        GpuPool([]).acquire(1)


@pytest.mark.parametrize("number", [-1, 1.5, float("nan"), float("inf"), "1", True, None])
def test_an_impossible_number(number):
    with pytest.raises(ActorStartError, match="num_gpus must be"):
        GpuPool(["0"]).acquire(number)


def test_giving_back_too_much():
    pool = GpuPool(["a", "b"])
    ids = pool.acquire(1)
    pool.release(ids, 1)
    with pytest.raises(ValueError, match="given back more"):
        pool.release(ids, 1)


def test_threads_do_not_get_the_same():
    pool = GpuPool([str(index) for index in range(50)])
    got = []
    threads = [
        threading.Thread(target=lambda: [got.extend(pool.acquire(1)) for _ in range(5)])
        for _ in range(10)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(got)) == 50
