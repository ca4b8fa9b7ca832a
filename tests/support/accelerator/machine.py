"""A process's simulated devices: their settings, memory, streams and copy engines."""

from __future__ import annotations

import bisect
import mmap
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from accelerator.memory import Heap, Memory, Opened, Pages, over
from accelerator.streams import SimStream
from conveyor.flag import Flag
from conveyor.later import LaterModule

if TYPE_CHECKING:
    import torch

    from conveyor.device import Device
else:
    torch = LaterModule("torch")

KIND = "sim"

KernelTime: TypeAlias = "float | Callable[[str, Sequence[tuple[int, ...]]], float]"
"""Seconds that a kernel takes, or what says so by its name (``"addmm"``) and the shapes of its tensors."""

VISIBLE = "SIM_VISIBLE_DEVICES"
"""The variable that says which devices a process sees, as ``CUDA_VISIBLE_DEVICES`` does: numbers with commas
between them. Empty: none. Unset: all."""


@dataclass(frozen=True)
class Settings:
    """Settings of a simulated accelerator.

    devices: how many there are: ``sim:0``, ``sim:1``...
    memory: bytes of each, in each process. Memory that nobody has written to costs nothing.
    bandwidth: bytes a second that a copy between host and device, or between devices, moves. Of each
        direction one copy is under way at a time. ``None``: copies take what they take.
    kernel_time: the least seconds that a kernel takes.
    """

    devices: int = 2
    memory: int = 256 << 20
    bandwidth: float | None = None
    kernel_time: float = 0.0

    def __post_init__(self) -> None:
        _check("devices", self.devices, 1 <= self.devices <= 64, int)
        _check("memory", self.memory, self.memory >= 1 << 16, int)
        if self.bandwidth is not None:
            _check("bandwidth", self.bandwidth, self.bandwidth > 0, (int, float))
        _check("kernel_time", self.kernel_time, self.kernel_time >= 0, (int, float))


def visible(settings: Settings) -> tuple[int, ...]:
    """List the devices that this process sees, by the numbers that all processes have for them."""
    named = os.environ.get(VISIBLE)
    if named is None:
        return tuple(range(settings.devices))
    numbers = [int(number) for number in named.split(",") if number.strip()]
    return tuple([number for number in numbers if 0 <= number < settings.devices])


def _check(name: str, value: Any, right: bool, kinds: Any) -> None:
    if not isinstance(value, kinds) or isinstance(value, bool) or not right:
        raise ValueError(f"{name} of a simulated accelerator cannot be {value!r}")


class _Current(threading.local):
    """Choices of one thread: its device, its streams, and the time that its kernels take."""

    def __init__(self) -> None:
        self.index = 0
        self.streams: dict[int, SimStream] = {}
        self.kernel_time: KernelTime | None = None


class Machine:
    """The simulated devices of this process.

    device: their protocol.
    settings: what they are like.
    visible: the number that all processes have for each device that this one sees.
    current: what each thread uses.
    ending: it is set when the interpreter ends, and nothing is waited for any more.
    """

    def __init__(self, device: Device, settings: Settings) -> None:
        self.device: Device = device
        self.settings = settings
        self.visible = visible(settings)
        self.current = _Current()
        self.ending = Flag()
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._heaps: dict[int, Heap] = {}
        self._streams: weakref.WeakSet[SimStream] = weakref.WeakSet()
        self._defaults: dict[int, SimStream] = {}
        self._made = 0
        self._opened: weakref.WeakValueDictionary[Any, Opened] = weakref.WeakValueDictionary()
        self._engines: dict[tuple[int, str], threading.Lock] = {}
        #: Pinned memory of the host: where each part begins, and where it ends.
        self._pinned: dict[int, int] = {}
        self._begins: list[int] = []
        #: Of memory that somebody else keeps: how many copies from and to it are under way, and its pages.
        self._copies: dict[int, int] = {}
        self._pages: dict[int, Pages] = {}
        #: What is pinned no more. It is appended to wherever memory ends, also within what is below.
        self.unpinned: deque[int] = deque()

    def check_process(self) -> None:
        """Raise an error in a forked child, which has none of the threads."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                "a simulated accelerator cannot be used in a forked child of the process that has "
                "used it: start the child with spawn"
            )

    def index(self, index: int | None = None) -> int:
        """Check an index; the current one for ``None``."""
        if index is None:
            index = self.current.index
        if not 0 <= index < len(self.visible):
            raise RuntimeError(f"there is no device {KIND}:{index}: there are {len(self.visible)}")
        return index

    def heap(self, index: int) -> Heap:
        """Find the memory of a device."""
        with self._lock:
            found = self._heaps.get(index)
            if found is None:
                found = self._heaps[index] = Heap(index, self.visible[index], self.settings.memory)
            return found

    # Streams.

    def new_stream(self, index: int) -> SimStream:
        """Make a stream."""
        with self._lock:
            self._made += 1
            return self._known(SimStream(self, index, f"{KIND}:{index} stream {self._made}"))

    def current_stream(self, index: int | None = None) -> SimStream:
        """Find the one on which this thread enqueues."""
        index = self.index(index)
        found = self.current.streams.get(index)
        if found is not None:
            return found
        with self._lock:
            default = self._defaults.get(index)
            if default is None:
                default = self._known(SimStream(self, index, f"{KIND}:{index} default stream"))
                self._defaults[index] = default
            return default

    def streams(self, index: int | None = None) -> list[SimStream]:
        """List those that there are, of one device or of all."""
        with self._lock:
            return [s for s in self._streams if index is None or s.index == index]

    @contextmanager
    def using(self, stream: SimStream) -> Iterator[None]:
        """Make ``stream`` the current one of this thread, and its device the current device."""
        here = self.current
        before = here.index, here.streams.get(stream.index)
        here.index, here.streams[stream.index] = stream.index, stream
        try:
            yield
        finally:
            here.index = before[0]
            if before[1] is None:
                del here.streams[stream.index]
            else:
                here.streams[stream.index] = before[1]

    # Memory.

    def allocate(self, nbytes: int, index: int) -> torch.Tensor:
        """Make a tensor of bytes, for the current stream of the device."""
        self.check_process()
        heap = self.heap(index)
        address = heap.take(nbytes)
        if address is None:
            # What is free once the streams have come to it.
            for stream in self.streams(index):
                with self._error_stays(stream):
                    stream.synchronize()
            address = heap.take(nbytes)
        if address is None:
            raise torch.OutOfMemoryError(
                f"{KIND}:{index} is out of memory: {nbytes} bytes were asked for, and {heap.room()} of "
                f"{heap.size} are free"
            )
        return over(Block(self, heap, address, nbytes), index)

    def open(self, handle: tuple[Any, ...]) -> Opened:
        """Map the memory of another process's device.

        Raises:
            RuntimeError: the process has ended, or this one does not see that device.
        """
        self.check_process()
        if handle[0] not in self.visible:
            raise RuntimeError(
                f"the memory of process {handle[1]} cannot be opened: it is on the device "
                f"{KIND}:{handle[0]}, which this process does not see"
            )
        key = handle[:5]
        with self._lock:
            found = self._opened.get(key)
            if found is None or not found.alive():
                found = self._opened[key] = Opened(handle)
            return found

    def kernel_seconds(self, name: str, tensors: Sequence[torch.Tensor]) -> float:
        """Say how long a kernel takes at least."""
        time = self.current.kernel_time
        if time is None:
            return self.settings.kernel_time
        return float(time(name, [tuple(t.shape) for t in tensors]) if callable(time) else time)

    @contextmanager
    def _error_stays(self, stream: SimStream) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            stream.fail(error)

    # Copies.

    def engine(self, index: int, direction: str, nbytes: int, copy: Callable[[], Any]) -> None:
        """Copy, in turn with the other copies of the direction."""
        with self._lock:
            engine = self._engines.setdefault((index, direction), threading.Lock())
        with engine:
            begin = time.perf_counter()
            copy()
            if self.settings.bandwidth is not None:
                rest = begin + nbytes / self.settings.bandwidth - time.perf_counter()
                if rest > 0:
                    self.ending.wait(rest)

    def pin(self, address: int, nbytes: int, *, ours: bool = False) -> None:
        """Note pinned memory of the host. ``ours``: what a copy needs of it is kept."""
        page = mmap.PAGESIZE
        if nbytes <= 0 or address % page:
            raise RuntimeError(
                f"memory is pinned by pages of {page} bytes, not {nbytes} at {address:#x}"
            )
        with self._lock:
            self._forget_unpinned()
            place = bisect.bisect_right(self._begins, address)
            before = self._begins[place - 1 : place]
            after = self._begins[place : place + 1]
            if any(self._pinned[b] > address for b in before) or any(
                b < address + nbytes for b in after
            ):
                raise RuntimeError(f"memory at {address:#x} is pinned already")
            self._begins.insert(place, address)
            self._pinned[address] = address + nbytes
            if not ours:
                self._copies[address] = 0
                self._pages[address] = Pages(address, nbytes)

    def unpin(self, address: int) -> None:
        """Forget pinned memory."""
        with self._lock:
            self._forget_unpinned()
            if address not in self._pinned:
                raise RuntimeError(f"nothing is pinned at {address:#x}")
            if self._copies.get(address):
                raise RuntimeError(f"a copy from or to the memory at {address:#x} is under way")
            del self._pinned[address]
            self._begins.remove(address)
            self._copies.pop(address, None)
            pages = self._pages.pop(address, None)
        if pages is not None:
            pages.close()

    def _forget_unpinned(self) -> None:
        while self.unpinned:
            address = self.unpinned.popleft()
            del self._pinned[address]
            self._begins.remove(address)

    def is_pinned(self, address: int, nbytes: int) -> bool:
        """Return whether all of this memory is pinned."""
        with self._lock:
            return self._pin_of(address, nbytes) is not None

    def pinned(self) -> list[tuple[int, int]]:
        """List what :meth:`pin` has pinned: where each part begins, and where it ends."""
        with self._lock:
            return sorted((begin, self._pinned[begin]) for begin in self._copies)

    def begin_copy(self, address: int, nbytes: int) -> int | None:
        """Note that a copy from or to this is enqueued: the number for :meth:`end_copy`. ``None``: the memory
        is not pinned, or is kept."""
        with self._lock:
            begin = self._pin_of(address, nbytes)
            if begin is None or begin not in self._copies:
                return None
            self._copies[begin] += 1
            return begin

    def end_copy(self, begin: int) -> None:
        """Note that such a copy is done."""
        with self._lock:
            self._copies[begin] -= 1

    def check_pages(self, begin: int) -> None:
        """Raise an error if pinned memory has other pages by now."""
        if self._pages[begin].changed():
            raise RuntimeError(f"the memory at {begin:#x} has lost its pages while it was pinned")

    def _pin_of(self, address: int, nbytes: int) -> int | None:
        self._forget_unpinned()
        place = bisect.bisect_right(self._begins, address)
        if place > 0 and self._pinned[self._begins[place - 1]] >= address + nbytes:
            return self._begins[place - 1]
        return None

    def end(self) -> None:
        """End before the interpreter does: no thread may be in the middle of an operation then."""
        if os.getpid() != self._pid:
            return
        deadline = time.monotonic() + 1
        self.ending.set()
        for stream in self.streams():
            stream.leave(deadline)

    def _known(self, stream: SimStream) -> SimStream:
        self._streams.add(stream)
        return stream


class Block(Memory):
    """Memory of a device that is given back when all streams that use it are done with it.

    It is the home stream's, on which it was made, and that of the streams that were named to ``keep``.
    """

    def __init__(self, machine: Machine, heap: Heap, address: int, nbytes: int) -> None:
        super().__init__(address, nbytes)
        self._machine = machine
        self._heap = heap
        self._pid = os.getpid()
        self.used_on = {machine.current_stream(heap.index)}
        blocks[address] = weakref.ref(self)

    def __del__(self) -> None:
        if os.getpid() != self._pid or sys.is_finalizing() or self._machine.ending.is_set():
            return
        blocks.pop(self.address, None)
        left = _Left(self._heap, self.address, self.nbytes, len(self.used_on))
        for stream in self.used_on:
            stream.enqueue("free", left.one_less, shown=False)


class Part(Memory):
    """Memory of another process's device. It stays mapped until the streams of this one are done with it."""

    def __init__(self, machine: Machine, opened: Opened, address: int, nbytes: int) -> None:
        super().__init__(address, nbytes)
        self._machine = machine
        self._opened = opened

    def __del__(self) -> None:
        if sys.is_finalizing() or self._machine.ending.is_set():
            return
        opened = self._opened
        for stream in self._machine.streams():
            if not stream.query():
                stream.enqueue("close", lambda: _let_go(opened), shown=False)


def _let_go(opened: Opened) -> None:
    del opened


class _Left:
    """How many streams still use a block."""

    def __init__(self, heap: Heap, address: int, nbytes: int, count: int) -> None:
        self._heap = heap
        self._address, self._nbytes = address, nbytes
        self._count = count
        self._lock = threading.Lock()

    def one_less(self) -> None:
        with self._lock:
            self._count -= 1
            last = not self._count
        if last:
            self._heap.give_back(self._address, self._nbytes)


#: By their addresses.
blocks: dict[int, weakref.ref[Block]] = {}
