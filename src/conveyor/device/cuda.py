"""NVIDIA's GPUs, and what else torch calls ``cuda``: one or two calls of torch for each method.

An H100 has run it; where there is none it is tried with a stand-in for ``torch.cuda``.
"""

from __future__ import annotations

import ctypes
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from conveyor.device import cuda_memory
from conveyor.device.base import Device, Event, Stream
from conveyor.later import LaterModule, import_later

if TYPE_CHECKING:
    import torch
else:
    torch = LaterModule("torch")


class CudaEvent(Event):
    """A ``torch.cuda.Event``.

    event: it.
    """

    def __init__(self, event: Any) -> None:
        self.event = event

    def record(self, stream: Stream | None = None) -> None:
        self.event.record(_native(stream) if stream is not None else torch.cuda.current_stream())

    def query(self) -> bool:
        return bool(self.event.query())

    def synchronize(self) -> None:
        self.event.synchronize()

    def handle(self) -> bytes:
        return bytes(self.event.ipc_handle())


class CudaStream(Stream):
    """A ``torch.cuda.Stream``.

    stream: it.
    """

    def __init__(self, device: CudaDevice, stream: Any) -> None:
        self.device = device
        self.stream = stream
        self.index = stream.device_index

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CudaStream) and bool(self.stream == other.stream)

    def __hash__(self) -> int:
        return hash(self.stream)

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self.stream.wait_event(event.event)

    def query(self) -> bool:
        return bool(self.stream.query())

    def synchronize(self) -> None:
        self.stream.synchronize()


class CudaDevice(Device):
    """Kind of device that torch calls ``cuda``."""

    kind = "cuda"

    def viable(self) -> str | None:
        if find_spec("torch") is None:
            return "torch is not installed"
        import_later("torch")  # under the lock of imports
        if torch.cuda.is_available():
            return None
        if os.environ.get(_VISIBLE) == "":
            return (
                f"torch finds no GPU, since {_VISIBLE} is empty: an actor that asks for no GPU sees none, so "
                "start it with num_gpus=1, or with a part of one (num_gpus=0.1)"
            )
        return "torch finds no GPU"

    def count(self) -> int:
        return int(torch.cuda.device_count())

    def current_index(self) -> int:
        return int(torch.cuda.current_device())

    def identity(self, index: int | None = None) -> str:
        """Return the GPU's UUID, since numbers follow ``CUDA_VISIBLE_DEVICES``."""
        which = self._index(index)
        return str(torch.cuda.get_device_properties(which).uuid)

    def memory(self, index: int | None = None) -> tuple[int, int]:
        """Return how many bytes are free and how many there are. Memory that torch keeps for later counts as
        used."""
        free, there = torch.cuda.mem_get_info(self._index(index))
        return int(free), int(there)

    def current_stream(self, index: int | None = None) -> Stream:
        return CudaStream(self, torch.cuda.current_stream(self._index(index)))

    def new_stream(self, index: int | None = None, *, urgent: bool = False) -> Stream:
        made = torch.cuda.Stream(self._index(index), priority=-1 if urgent else 0)
        return CudaStream(self, made)

    @contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        with torch.cuda.stream(_native(stream)):
            yield

    def new_event(self, index: int | None = None, *, interprocess: bool = False) -> Event:
        """Make an event. Its device is set by its first record, or is the current one at
        :meth:`Event.handle`; ``index`` is not used."""
        return CudaEvent(torch.cuda.Event(enable_timing=False, interprocess=interprocess))

    def open_event(self, handle: bytes, index: int | None = None) -> Event:
        where = torch.device("cuda", self._index(index))
        return CudaEvent(torch.cuda.Event.from_ipc_handle(where, handle))

    def synchronize(self, index: int | None = None) -> None:
        torch.cuda.synchronize(self._index(index))

    def empty(self, nbytes: int, index: int | None = None) -> torch.Tensor:
        where = torch.device("cuda", self._index(index))
        return torch.empty(nbytes, dtype=torch.uint8, device=where)

    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        tensor.record_stream(_native(stream))

    def empty_pinned(self, nbytes: int) -> torch.Tensor:
        """Make a pinned tensor of bytes. torch's allocator notes the streams that copy from and to it, and so
        does not use its memory too early."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def pin(self, address: int, nbytes: int) -> None:
        """Pin mapped memory of the host, portably: all GPUs know it."""
        torch.cuda.init()  # the calls of the runtime need a context
        code = torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE)
        if int(code):
            _forget_error()
        _check(code, "cudaHostRegister")

    def unpin(self, address: int) -> None:
        _check(torch.cuda.cudart().cudaHostUnregister(address), "cudaHostUnregister")

    def cannot_export(self, tensor: torch.Tensor) -> str | None:
        """Say why other processes cannot open a tensor's memory. Memory that torch's allocator cannot export
        raises in :meth:`export_memory` only."""
        if tensor.device.type != "cuda":
            return f"is on device {str(tensor.device)!r}"
        return None

    def export_memory(self, tensor: torch.Tensor) -> bytes:
        storage, index = tensor.untyped_storage(), tensor.device.index
        torch.cuda.init()
        handle, offset = cuda_memory.export(index, storage.data_ptr())
        return pickle.dumps((self.identity(index), handle, offset, storage.nbytes()), 5)

    def open_memory(self, handle: bytes) -> torch.Tensor:
        identity, shared, offset, nbytes = pickle.loads(handle)
        here = [i for i in range(self.count()) if self.identity(i) == identity]
        if not here:
            raise RuntimeError(f"this process cannot reach the GPU {identity}")
        torch.cuda.init()
        opened = cuda_memory.Opened(here[0], shared, offset, nbytes)
        return torch.as_tensor(opened, device=torch.device("cuda", here[0]))

    def _index(self, index: int | None) -> int:
        return self.current_index() if index is None else index


#: The variable that says which GPUs the process sees.
_VISIBLE = "CUDA_VISIBLE_DEVICES"
#: Flag of cudaHostRegister: pinned for all contexts.
_PORTABLE = 1


def _native(stream: Stream) -> Any:
    assert isinstance(stream, CudaStream)
    return stream.stream


def _forget_error() -> None:
    """Have the runtime forget this thread's last error: torch would tell whoever enqueues the next kernel."""
    last = getattr(ctypes.CDLL(None), "cudaGetLastError", None)
    if last is not None:
        last()


def _check(code: Any, call: str) -> None:
    if int(code):
        runtime = torch.cuda.cudart()
        told = runtime.cudaGetErrorString(runtime.cudaError(int(code)))
        raise RuntimeError(f"{call} has failed: {told}")


DEVICE = CudaDevice()
