"""CUDA's device says what it is told to torch: here to a stand-in, since most machines have no GPU."""

import ctypes
import gc
import shutil
import subprocess
from types import SimpleNamespace
from unittest import mock

import pytest

from conveyor import device
from conveyor.device import cuda as cuda_memory
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


def test_which_there_are(fake, cuda, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert cuda.viable() is None
    assert (cuda.count(), cuda.current_index(), cuda.identity()) == (2, 1, "uuid-1")
    assert cuda.identity(0) == "uuid-0"
    assert cuda.memory(0) == (3, 4)
    fake.cuda.mem_get_info.assert_called_once_with(0)
    fake.cuda.is_available.return_value = False
    assert cuda.viable() == "torch finds no GPU"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "asks for no GPU sees none, so start it with num_gpus=1" in cuda.viable()


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
    runtime.cudaHostUnregister.return_value = 0
    cuda.unpin(4096)
    runtime.cudaHostUnregister.assert_called_once_with(4096)
    runtime.cudaHostUnregister.return_value = 1
    runtime.cudaGetErrorString.return_value = "invalid argument"
    with pytest.raises(RuntimeError, match="cudaHostUnregister has failed: invalid argument"):
        cuda.unpin(4096)


def test_a_refusal_to_pin_is_told_once_and_forgotten_by_the_runtime(fake, cuda, monkeypatch):
    library = mock.MagicMock()
    monkeypatch.setattr(cuda_module.ctypes, "CDLL", lambda name: library)
    runtime = fake.cuda.cudart.return_value
    runtime.cudaHostRegister.return_value = 2
    runtime.cudaGetErrorString.return_value = "out of memory"
    with pytest.raises(RuntimeError, match="cudaHostRegister has failed: out of memory"):
        cuda.pin(4096, 8192)
    library.cudaGetLastError.assert_called_once_with()
    runtime.cudaHostRegister.return_value = 0
    cuda.pin(4096, 8192)
    library.cudaGetLastError.assert_called_once_with()


DRIVER = r"""
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef struct { unsigned char bytes[64]; } Handle;
static int depth, open_handles;

int depth_of(void) { return depth; }
int opened(void) { return open_handles; }
int cuInit(unsigned flags) { return flags != 0; }
int cuDeviceGet(int* device, int ordinal) { *device = ordinal + 7; return ordinal > 1; }
int cuDevicePrimaryCtxRetain(void** context, int device) { *context = (void*)(intptr_t)(device * 100);
return device < 7; } int cuCtxPushCurrent_v2(void* context) { ++depth; return (intptr_t)context % 100 != 0; }
int cuCtxPopCurrent_v2(void** context) { --depth; *context = 0; return 0; }
int cuMemGetAddressRange_v2(uint64_t* base, size_t* size, uint64_t address) {
  *base = address & ~(uint64_t)0xffff; *size = 0x10000; return depth != 1;
}
static uint64_t allocations;
void free_and_allocate(void) { ++allocations; }
int cuPointerGetAttribute(uint64_t* number, int attribute, uint64_t address) {
  *number = allocations; return attribute != 7 || depth != 1;
}
int cuIpcGetMemHandle(Handle* handle, uint64_t base) {
  memset(handle, 0x5a, sizeof *handle);
  memcpy(handle->bytes, &base, sizeof base);
  return base == 0x10000 ? 1 : depth != 1;
}
int cuIpcOpenMemHandle_v2(uint64_t* base, Handle handle, unsigned flags) {
  memcpy(base, handle.bytes, sizeof *base);
  ++open_handles;
  return handle.bytes[63] != 0x5a || flags != 1 || depth != 1;
}
int cuIpcCloseMemHandle(uint64_t base) { --open_handles; return base == 0 || depth != 1; }
int cuGetErrorString(int code, const char** told) { *told = "invalid argument"; return 0; }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A stand-in for CUDA's driver, in C: so that it is called as C is."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no compiler")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    path = str(folder / "libcuda.so")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", path, folder / "driver.c"], check=True)
    return path


@pytest.fixture
def driver(fake, library, monkeypatch):
    monkeypatch.setattr(cuda_memory, "LIBRARY", library)
    cuda_memory._driver.cache_clear()
    cuda_memory._context.cache_clear()
    yield ctypes.CDLL(library)
    fake.reset_mock()  # it has what was opened
    gc.collect()
    cuda_memory._driver.cache_clear()
    cuda_memory._context.cache_clear()


def of_storage(address, nbytes, index=1):
    tensor = mock.MagicMock()
    tensor.device = torch.device("cuda", index)
    tensor.untyped_storage.return_value.data_ptr.return_value = address
    tensor.untyped_storage.return_value.nbytes.return_value = nbytes
    return tensor


def test_memory_is_opened_where_it_lies_in_its_allocation(fake, cuda, driver):
    handle = cuda.export_memory(of_storage(0x7F0000020040, 64))
    cuda.open_memory(handle)
    opened = fake.as_tensor.call_args.args[0]
    told = opened.__cuda_array_interface__
    assert (told["data"], told["shape"]) == ((0x7F0000020040, False), (64,))
    assert (driver.depth_of(), driver.opened()) == (0, 1)
    again = cuda_memory.Opened(1, b"\1" * 8 + b"\x5a" * 56, 0, 5)
    assert driver.opened() == 2
    fake.reset_mock()
    del opened, again
    gc.collect()
    assert (driver.depth_of(), driver.opened()) == (0, 0)


def test_memory_that_was_made_anew_has_another_handle(fake, cuda, driver):
    first = cuda.export_memory(of_storage(0x7F0000020040, 64))
    assert cuda.export_memory(of_storage(0x7F0000020040, 64)) == first
    driver.free_and_allocate()
    assert cuda.export_memory(of_storage(0x7F0000020040, 64)) != first


def test_memory_finds_the_gpu_by_its_name_not_its_number(fake, cuda, driver):
    handle = cuda.export_memory(of_storage(0x7F0000020040, 64))
    fake.cuda.get_device_properties.side_effect = lambda i: SimpleNamespace(uuid=f"uuid-{1 - i}")
    cuda.open_memory(handle)
    assert fake.as_tensor.call_args.kwargs["device"] == torch.device("cuda", 0)
    fake.cuda.device_count.return_value = 0
    with pytest.raises(RuntimeError, match="this process cannot reach the GPU uuid-1"):
        cuda.open_memory(handle)


def test_what_the_driver_refuses_is_told(fake, cuda, driver):
    with pytest.raises(RuntimeError, match="cuIpcGetMemHandle has failed: invalid argument"):
        cuda.export_memory(of_storage(0x10040, 64))
    assert driver.depth_of() == 0
