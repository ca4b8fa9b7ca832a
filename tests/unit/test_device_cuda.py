"""CUDA's device says what it is told to torch: here to a stand-in, since most machines have no GPU."""

from types import SimpleNamespace
from unittest import mock

import pytest

from conveyor import device
from conveyor.device import cuda as cuda_module

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


@pytest.fixture
def fake(monkeypatch):
    fake = mock.MagicMock()
    fake.device = torch.device
    fake.cuda.is_available.return_value = True
    fake.cuda.device_count.return_value = 2
    fake.cuda.current_device.return_value = 1
    fake.cuda.get_device_properties.side_effect = lambda i: SimpleNamespace(uuid=f"uuid-{i}")
    fake.cuda.mem_get_info.return_value = (3, 4)
    fake.cuda.current_stream.side_effect = lambda *at: SimpleNamespace(device_index=at[0])
    monkeypatch.setattr(cuda_module, "torch", fake)
    return fake


@pytest.fixture
def cuda():
    return device.get("cuda")


def test_which_there_are(fake, cuda):
    assert cuda.viable() is None
    assert (cuda.count(), cuda.current_index(), cuda.identity()) == (2, 1, "uuid-1")
    assert cuda.identity(0) == "uuid-0"
    assert cuda.memory(0) == (3, 4)
    fake.cuda.mem_get_info.assert_called_once_with(0)
    fake.cuda.is_available.return_value = False
    assert cuda.viable() == "torch finds no GPU"


def test_streams_and_events(fake, cuda):
    assert cuda.current_stream().index == 1
    stream = cuda.new_stream(0, urgent=True)
    fake.cuda.Stream.assert_called_once_with(0, priority=-1)
    event = stream.record(interprocess=True)
    fake.cuda.Event.assert_called_once_with(enable_timing=False, interprocess=True)
    event.event.record.assert_called_once_with(stream.stream)
    stream.wait_event(event)
    stream.stream.wait_event.assert_called_once_with(event.event)
    event.event.ipc_handle.return_value = b"handle"
    assert event.handle() == b"handle"
    cuda.open_event(b"handle")
    fake.cuda.Event.from_ipc_handle.assert_called_once_with(torch.device("cuda", 1), b"handle")
    with cuda.using(stream):
        fake.cuda.stream.assert_called_once_with(stream.stream)


def test_memory(fake, cuda):
    stream = cuda.new_stream()
    tensor = mock.MagicMock()
    tensor.device = torch.device("cuda", 0)
    cuda.keep(tensor, stream)
    tensor.record_stream.assert_called_once_with(stream.stream)
    cuda.empty(5)
    fake.empty.assert_called_once_with(5, dtype=fake.uint8, device=torch.device("cuda", 1))
    target, source = mock.MagicMock(), mock.MagicMock()
    cuda.copy(target, source)
    target.copy_.assert_called_once_with(source, non_blocking=True)
    assert cuda.cannot_export(tensor) is None
    assert cuda.cannot_export(torch.ones(1)) == "is on device 'cpu'"


def test_memory_of_the_host_is_pinned_and_refusals_are_told(fake, cuda):
    runtime = fake.cuda.cudart.return_value
    runtime.cudaHostRegister.return_value = 0
    cuda.pin(4096, 8192)
    runtime.cudaHostRegister.assert_called_once_with(4096, 8192, 1)
    runtime.cudaHostUnregister.return_value = 1
    runtime.cudaGetErrorString.return_value = "invalid argument"
    with pytest.raises(RuntimeError, match="cudaHostUnregister has failed: invalid argument"):
        cuda.unpin(4096)


def test_memory_finds_the_gpu_by_its_name_not_its_number(fake, cuda):
    tensor = mock.MagicMock()
    tensor.device = torch.device("cuda", 1)
    tensor.untyped_storage.return_value._share_cuda_.return_value = (
        1,
        b"h",
        64,
        0,
        b"c",
        0,
        b"",
        False,
    )
    handle = cuda.export_memory(tensor)
    fake.cuda.get_device_properties.side_effect = lambda i: SimpleNamespace(uuid=f"uuid-{1 - i}")
    cuda.open_memory(handle)
    fake.UntypedStorage._new_shared_cuda.assert_called_once_with(
        0, b"h", 64, 0, b"c", 0, b"", False
    )
    fake.cuda.device_count.return_value = 0
    with pytest.raises(RuntimeError, match="this process cannot reach the GPU uuid-1"):
        cuda.open_memory(handle)
