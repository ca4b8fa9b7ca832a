"""A simulated accelerator: a device of torch, ``"sim"``, with streams, events and memory of its own.

Its tensors are tensors of torch. What is done with them is enqueued, and done later by a thread of the
stream, in order; copies and kernels take the times that they are given. So a missing wait between two
streams, or between a stream and the host, shows as wrong values (memory that nobody has written yet holds
NaN), and overlap can be seen and measured, without a GPU. The library moves its tensors as those of CUDA.
"""

from accelerator.device import (
    SimDevice,
    SimGroup,
    cannot_simulate,
    install,
    kernel,
    kernel_time,
)
from accelerator.machine import KIND, Settings
from accelerator.streams import Work, watching

__all__ = [
    "KIND",
    "Settings",
    "SimDevice",
    "SimGroup",
    "Work",
    "cannot_simulate",
    "install",
    "kernel",
    "kernel_time",
    "watching",
]
