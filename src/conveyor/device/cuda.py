"""NVIDIA's GPUs, and what else torch calls ``cuda``: one or two calls of torch for each method.

An H100 has run it; where there is none it is tried with a stand-in for ``torch.cuda``.

torch can share memory, too, but its handles are good for one reader each, and the writer's memory stays until
that reader has opened it. Here whoever shares memory keeps it, and anybody may open it any number of times.
"""

from __future__ import annotations

import ctypes
import functools
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from conveyor.device.base import Device, Event, Stream
from conveyor.later import LaterModule, import_later

_LAZY_PEER_ACCESS = 1  # of cuIpcOpenMemHandle: from other GPUs, once it is used there
_BUFFER_ID = 7  # of cuPointerGetAttribute: a number that no other allocation of the process has

#: The library, which comes with the kernel's module.
LIBRARY = "libcuda.so.1"


class _Handle(ctypes.Structure):
    """``CUipcMemHandle``, which goes by value."""

    _fields_ = (("bytes", ctypes.c_ubyte * 64),)


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise RuntimeError(f"CUDA's driver cannot be loaded: {error}") from None
    pointer, out, flags = ctypes.c_uint64, ctypes.POINTER(ctypes.c_uint64), ctypes.c_uint
    context = ctypes.c_void_p
    for name, arguments in {
        "cuInit": (flags,),
        "cuDeviceGet": (ctypes.POINTER(ctypes.c_int), ctypes.c_int),
        "cuDevicePrimaryCtxRetain": (ctypes.POINTER(context), ctypes.c_int),
        "cuCtxPushCurrent_v2": (context,),
        "cuCtxPopCurrent_v2": (ctypes.POINTER(context),),
        "cuMemGetAddressRange_v2": (out, ctypes.POINTER(ctypes.c_size_t), pointer),
        "cuPointerGetAttribute": (out, ctypes.c_int, pointer),
        "cuIpcGetMemHandle": (ctypes.POINTER(_Handle), pointer),
        "cuIpcOpenMemHandle_v2": (out, _Handle, flags),
        "cuIpcCloseMemHandle": (pointer,),
        "cuGetErrorString": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
    }.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, ctypes.c_int
    _check_driver(library.cuInit(0), "cuInit", library)
    return library


def _check_driver(code: int, call: str, library: ctypes.CDLL) -> None:
    if code:
        message = ctypes.c_char_p()
        library.cuGetErrorString(code, ctypes.byref(message))
        why = message.value.decode() if message.value else f"error {code}"
        raise RuntimeError(f"{call} has failed: {why}")


def _call(name: str, *arguments: Any) -> None:
    library = _driver()
    _check_driver(getattr(library, name)(*arguments), name, library)


@functools.cache
def _context(index: int) -> ctypes.c_void_p:
    """The context that torch works in. It is retained, and never given back: torch's is not, either."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _call("cuDeviceGet", ctypes.byref(device), index)
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    return context


@contextmanager
def _on(index: int) -> Iterator[None]:
    _call("cuCtxPushCurrent_v2", _context(index))
    try:
        yield
    finally:
        _call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


def export(index: int, address: int) -> tuple[bytes, int]:
    """Describe the allocation that an address of a GPU lies in. Returns the handle, behind which stands the
    number that the allocation has in this process, and how far the address is behind its beginning. So no
    two allocations have the same handle, although one may be where another was.

    Raises:
        RuntimeError: CUDA cannot share memory of this kind (``expandable_segments``, say).
    """
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
    number = ctypes.c_uint64()
    with _on(index):
        _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
        _call("cuPointerGetAttribute", ctypes.byref(number), _BUFFER_ID, address)
        try:
            _call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        except RuntimeError as error:
            raise RuntimeError(
                f"{error}: other processes cannot open memory of this kind. torch makes such memory where "
                "PYTORCH_CUDA_ALLOC_CONF says expandable_segments:True"
            ) from None
    return bytes(handle.bytes) + bytes(number), address - base.value


class Opened:
    """A part of another process's allocation, mapped here as long as this lives. torch takes it for a tensor
    of bytes.

    address: where the part begins.
    """

    def __init__(self, index: int, handle: bytes, offset: int, nbytes: int) -> None:
        """Map the memory.

        Raises:
            RuntimeError: the process has ended, or the GPU cannot be reached.
        """
        self._index = index
        self._base: int | None = None
        self._nbytes = nbytes
        base = ctypes.c_uint64()
        with _on(index):
            packed = _Handle.from_buffer_copy(handle)
            _call("cuIpcOpenMemHandle_v2", ctypes.byref(base), packed, _LAZY_PEER_ACCESS)
        self._base = base.value
        self.address = base.value + offset

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Array interface, as Numba defines it: contiguous bytes, in the order of whatever stream uses
        them."""
        return {
            "shape": (self._nbytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 2,
        }

    def __del__(self) -> None:
        base, self._base = self._base, None
        if base is not None:
            # CUDA may have ended before, or the process that it was opened from.
            with suppress(RuntimeError), _on(self._index):
                _call("cuIpcCloseMemHandle", base)


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
        handle, offset = export(index, storage.data_ptr())
        return pickle.dumps((self.identity(index), handle, offset, storage.nbytes()), 5)

    def open_memory(self, handle: bytes) -> torch.Tensor:
        identity, shared, offset, nbytes = pickle.loads(handle)
        here = [i for i in range(self.count()) if self.identity(i) == identity]
        if not here:
            raise RuntimeError(f"this process cannot reach the GPU {identity}")
        torch.cuda.init()
        opened = Opened(here[0], shared, offset, nbytes)
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
        message = runtime.cudaGetErrorString(runtime.cudaError(int(code)))
        raise RuntimeError(f"{call} has failed: {message}")


DEVICE = CudaDevice()
