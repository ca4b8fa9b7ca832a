"""A simulated accelerator: a device of torch, ``"sim"``, with streams, events and memory of its own.

Its tensors are tensors of torch. What is done with them is enqueued, and done later by a thread of the
stream, in order; copies and kernels take the times that they are given. So a missing wait between two
streams, or between a stream and the host, shows as wrong values (memory that nobody has written yet holds
NaN), and overlap can be seen and measured, without a GPU. The library moves its tensors as those of CUDA.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from accelerator.device import SimDevice, cannot_simulate
from accelerator.group import SimGroup
from accelerator.machine import KIND
from accelerator.ops import Operations
from accelerator.settings import KernelTime, Settings
from accelerator.storages import twin
from accelerator.streams import Work, watching
from conveyor import device as devices
from conveyor import transport
from conveyor.later import LaterModule
from conveyor.transport.device_ipc import DeviceIpcTransport

if TYPE_CHECKING:
    import torch
else:
    torch = LaterModule("torch")

__all__ = [
    "Settings",
    "SimDevice",
    "SimGroup",
    "Work",
    "install",
    "kernel",
    "kernel_time",
    "watching",
]

_lock = threading.RLock()
_installed: list[Any] = []


def install(settings: Settings | None = None) -> SimDevice:
    """Have torch know the device ``"sim"`` in this process, and register it with the library, with the
    transport ``"sim_ipc"`` over it. An actor that gets a tensor of it has it then, with the same settings;
    one that makes the first itself installs it.

    Gradients can be had on ``sim:0``, if it is installed before the first ``backward()`` of the process:
    torch counts its devices then.

    ``settings``: what it is like; ``None``: as it was installed before, or the defaults.

    Raises:
        RuntimeError: torch is missing or too old, it was installed with other settings, or the program has
            another device in its place (torch has one place for what it does not know).
    """
    with _lock:
        there = devices.get(KIND)
        if there is not None:
            if not isinstance(there, SimDevice):
                raise RuntimeError(f"the kind {KIND!r} is taken by {there!r}")
            if settings not in (None, there.machine.settings):
                raise RuntimeError(
                    f"the simulated accelerator is installed with {there.machine.settings}, and cannot be "
                    f"changed to {settings}"
                )
            return there
        why_not = cannot_simulate()
        if why_not is not None:
            raise RuntimeError(f"there can be no simulated accelerator: {why_not}")
        made = SimDevice(settings or Settings())
        _tell_torch(made)
        devices.register(made)
        transport.register(DeviceIpcTransport(made))
        # Threads must not be in the middle of an operation of torch when the interpreter ends.
        threading_atexit = getattr(threading, "_register_atexit", atexit.register)
        threading_atexit(made.machine.end)
        return made


def kernel(
    seconds: float, function: Callable[..., object] | None = None, *tensors: torch.Tensor
) -> None:
    """Enqueue a kernel that takes ``seconds`` at least, on the current stream of the tensors' device.

    ``function`` is called with tensors of the CPU that lie in the same memory as ``tensors``, which it reads
    and writes. Without one the kernel only takes time.

    Raises:
        ValueError: a tensor is on no simulated device, or they are on several.
    """
    if len({t.device for t in tensors}) > 1 or any(t.device.type != KIND for t in tensors):
        where = ", ".join(sorted({str(t.device) for t in tensors}))
        raise ValueError(f"a kernel works on tensors of one simulated device, not of {where}")
    machine = install().machine
    stream = machine.current_stream(tensors[0].device.index if tensors else None)
    here = [twin(tensor) for tensor in tensors]

    def work() -> None:
        if function is not None:
            with torch.inference_mode():
                function(*here)

    stream.enqueue(getattr(function, "__name__", "kernel"), work, seconds)


@contextmanager
def kernel_time(time: KernelTime) -> Iterator[None]:
    """Have each kernel that this thread enqueues meanwhile take a time, at least: seconds, or a function
    that gets the kernel's name (``"addmm"``) and the shapes of its tensors."""
    current = install().machine.current
    before, current.kernel_time = current.kernel_time, time
    try:
        yield
    finally:
        current.kernel_time = before


def _tell_torch(made: SimDevice) -> None:
    from torch.utils import backend_registration

    if torch._C._get_privateuse1_backend_name() not in ("privateuseone", KIND):
        taken = torch._C._get_privateuse1_backend_name()
        raise RuntimeError(
            f"torch has one place for a device that it does not know, and {taken!r} has it"
        )
    backend_registration._setup_privateuseone_for_python_backend(KIND, _Module(made))
    library = torch.library.Library("_", "IMPL")
    library.fallback(Operations(made.machine), "PrivateUse1")
    # A copy carries out what a view says of its values. Otherwise torch would copy to do so, without end.
    copies = torch.library.Library("aten", "IMPL")
    for view in ("Conjugate", "Negative"):
        copies.impl("_copy_from", torch.library.fallthrough_kernel, view)
    _installed.extend([library, copies])  # what they have registered ends with them


class _Module:
    """What torch knows as ``torch.sim``."""

    def __init__(self, made: SimDevice) -> None:
        self._device = made

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return self._device.current_index()

    def device_count(self) -> int:
        return self._device.count()

    def synchronize(self, index: int | None = None) -> None:
        self._device.synchronize(index)

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Kernels draw from the generator of the CPU."""
