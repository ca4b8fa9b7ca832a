"""Kinds of device are found by name, and come to other processes."""

import pickle

import pytest

from conveyor import device
from conveyor.device import base
from conveyor.device.base import Device


def make_stub(kind="stub"):
    members = dict.fromkeys(Device.__abstractmethods__, lambda self, *a, **k: None)
    made = type("Stub", (Device,), {**members, "recipe": lambda self: (make_stub, (kind,))})()
    made.kind = kind
    return made


@pytest.fixture
def stub():
    made = make_stub()
    device.register(made)
    yield made
    if "stub" in device.kinds():
        device.unregister("stub")


def test_a_registered_device_is_found_by_its_kind(stub):
    assert device.get("stub") is stub
    assert {"cuda", "stub"} <= set(device.kinds())
    device.unregister("stub")
    assert device.get("stub") is None
    with pytest.raises(ValueError, match="no device was registered of the kind 'stub'"):
        device.unregister("stub")


def test_cuda_is_there_under_both_its_names():
    assert device.get("cuda") is device.get("gpu")
    assert device.get("cuda").kind == "cuda"
    assert device.get("cpu") is device.get("meta") is None


def test_a_tensor_knows_its_device():
    torch = pytest.importorskip("torch")
    assert device.of(torch.ones(1)) is None
    assert device.of(torch.ones(1, device="meta")) is None


def test_a_device_is_pickled_as_what_makes_it(stub):
    assert pickle.loads(pickle.dumps(stub)) is stub
    pickled = pickle.dumps(stub)
    device.unregister("stub")
    made = pickle.loads(pickled)
    assert made is not stub
    assert device.get("stub") is made is pickle.loads(pickled)


def test_one_that_registers_itself_is_registered_once():
    def make():
        made = make_stub()
        base.register(made)
        return made

    try:
        assert base.adopt("stub", make, ()) is base.get("stub")
    finally:
        base.unregister("stub")


@pytest.mark.parametrize("kind", ["cuda", "gpu", "cpu", "meta", "default", "stub"])
def test_a_kind_that_is_taken_is_refused(stub, kind):
    with pytest.raises(ValueError, match=kind):
        device.register(make_stub(kind))


@pytest.mark.parametrize("wrong", [None, "cuda", Device])
def test_what_is_no_device_is_refused(wrong):
    with pytest.raises(TypeError, match=r"a conveyor\.device\.Device is registered"):
        device.register(wrong)


@pytest.mark.parametrize("kind", [None, "", "a b", 7])
def test_a_device_without_a_kind_is_refused(kind):
    with pytest.raises(TypeError, match="has no kind"):
        device.register(make_stub(kind))
