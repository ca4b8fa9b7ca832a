"""Tensors of devices travel in frames by way of the host, through arena memory that devices have pinned.

A block of an arena that is used again and again by values of a device is pinned in each process that copies
from or to it, once for a kind of device. Before that the process marks the block, and its owner gives no
memory back that lies in a marked one (``native/arena/pins.h``): so the pages under a device never change.
What a process has not used for a while it gives up again.

At the writer the copies of all tensors of a value are enqueued when it has been pickled, and waited for once.
They go to the block of the arena that the frame is sent with. At the reader the copies from there are
enqueued on the current stream, ahead of whatever the reader enqueues next: it does not wait. Where a block is
not pinned a copy goes by way of other memory that is.
"""

from __future__ import annotations

import functools
import os
import pickle
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from conveyor import _core
from conveyor import device as devices
from conveyor.codec.tensors.encoding import unexpanded
from conveyor.device import Device, Event, Stream
from conveyor.device.base import happened, wait_until
from conveyor.exceptions import SerializationError

if TYPE_CHECKING:
    import logging

    import torch


#: Blocks with so many bytes are worth it. To pin one costs about as much as to copy what is in it a few
#: times, and a device may know only so many.
WORTH = 1 << 20
#: Of these, parts with so many bytes are copied from where they lie; for smaller ones a copy costs less than
#: what is done to keep track of it.
LEAST = 1 << 16
#: How many blocks a process has pinned at most.
MOST = 64
#: How many blocks it remembers that were used once.
_REMEMBERED = 256
#: Seconds after which a device that has refused to pin is asked again; twice as many each time.
_PAUSES = 1.0, 64.0
#: Seconds between two looks at copies that are under way, whose ends no device tells; nobody waits for it.
_LOOK = 0.05
#: Seconds that the end of a session waits for copies.
_TIME_LIMIT = 1.0


class Block:
    """A block that a kind of device has pinned.

    begin, end: where it lies.
    """

    __slots__ = ("begin", "copies", "device", "end", "mark", "used")

    def __init__(self, device: Device, mark: _core.BlockPin) -> None:
        self.device = device
        self.mark = mark
        self.begin = mark.address
        self.end = mark.address + mark.nbytes
        #: How many copies from or to it are under way.
        self.copies = 0
        self.used = 0.0


class Use:
    """Mark that a copy from or to a block may be under way, until :meth:`end`, or as long as this lives. A
    signal handler may raise before the caller knows of the block, or after the block was handed on."""

    __slots__ = ("_block",)

    def __init__(self, block: Block) -> None:
        # No handler runs between these: nothing is called.
        block.copies += 1
        self._block: Block | None = block

    def end(self) -> Block | None:
        """Return the block the first time, else ``None``."""
        block, self._block = self._block, None
        if block is not None:
            block.copies -= 1
        return block

    def __del__(self) -> None:
        self.end()


class Pinned:
    """Registry of the memory that one process of a session has pinned."""

    def __init__(
        self,
        words: _core.PinWords,
        allocate: Callable[[int], _core.Buffer],
        start: Callable[[], object],
        idle: float,
    ) -> None:
        """``words``: where it is told that memory is short. ``allocate`` makes memory in the arena of this
        process. ``start`` is called before anything is pinned, for a thread that calls :meth:`tidy` from then
        on. ``idle``: seconds after which what is not used is given up."""
        self._words = words
        self._allocate = allocate
        self._start = start
        self._idle = idle
        self._pid = os.getpid()
        self._lock = threading.RLock()  # a signal handler may get a value, too
        self._blocks: dict[tuple[str, int], Block] = {}
        #: The value that a block had when it was used first.
        self._seen: dict[tuple[str, int], int] = {}
        #: Copies, with what keeps their memory theirs.
        self._under_way: list[_UnderWay] = []
        self._refused: dict[str, tuple[float, float]] = {}
        self._look = 0.0  # when the thread looks next; 0: when it is woken
        self._closed = False

    def here(self) -> bool:
        """Whether this is the process that pinned the memory, and not a forked child."""
        return self._pid == os.getpid()

    def allocate(self, nbytes: int) -> _core.Buffer | None:
        """Make memory in the arena, to be sent from there. ``None``: there is none."""
        if self._closed or not self.here():
            return None
        with suppress(MemoryError):
            return self._allocate(nbytes)
        return None

    def take(self, buffer: object, device: Device) -> Use | None:
        """Find the block that all of ``buffer`` lies in, pinned for ``device``. A copy from or to it is
        counted as under way until :meth:`give_back`. ``None``: it is not, and is not to be."""
        if not isinstance(buffer, _core.Buffer) or buffer.nbytes < LEAST or not self.here():
            return None
        found = self._words.block(buffer)
        if found is None or found[1] < WORTH:
            return None
        address, _, use = found
        key = device.kind, address
        with self._lock:
            if self._closed:
                return None
            block = self._blocks.get(key)
            if block is not None and buffer.address + buffer.nbytes > block.end:
                # It has got more memory since, for a larger value.
                if block.copies or not self._unpin(key):
                    return None
                block = self._pin(key, buffer, device)
            elif block is None and self._again(key, use):
                block = self._pin(key, buffer, device)
            if block is None:
                return None
            block.used = _core.monotonic()
            taken = Use(block)
        return taken

    def give_back(self, use: Use) -> None:
        """End a copy that is done, or was never begun."""
        with self._lock:
            block = use.end()
            if block is not None:
                block.used = _core.monotonic()
            self._look_within(self._idle)

    def hold(self, event: Event, buffer: _core.Buffer, use: Use) -> None:
        """Keep ``buffer``, and its block pinned, until ``event`` has happened."""
        with self._lock:
            self._sweep()
            self._under_way.append((event, buffer, use))
            self._look_within(_LOOK)

    def counts(self) -> tuple[int, int]:
        """How many blocks are pinned, and how many copies are under way."""
        with self._lock:
            self._sweep()
            return len(self._blocks), len(self._under_way)

    # The thread's.

    def pause(self) -> float:
        """Say how many seconds there is nothing to do; 0: until it is woken."""
        with self._lock:
            now = _core.monotonic()
            if self._under_way:
                seconds = _LOOK
            else:
                # Who gives back one that is in use has the thread look.
                used = [block.used for block in self._blocks.values() if block.copies == 0]
                seconds = max(min(used) + self._idle - now, 0.001) if used else 0.0
            self._look = now + seconds if seconds else 0.0
            return seconds

    def tidy(self, requested: bool) -> bool:
        """Let go of what is done and of what is not used any more; if somebody has ``requested``, of all
        that is not needed just now. Whether anything is left."""
        if requested:
            for event, _, _ in list(self._under_way):
                with suppress(Exception):  # whoever waits for the stream is told
                    event.synchronize()
        with self._lock:
            self._sweep()
            now = _core.monotonic()
            for key, block in list(self._blocks.items()):
                if block.copies == 0 and (
                    requested or self._closed or now - block.used >= self._idle
                ):
                    self._unpin(key)
            return bool(self._blocks or self._under_way)

    def close(self) -> None:
        """Close the registry at the end of the session. Copies that are not done within a second are left to
        the thread."""
        with self._lock:
            self._closed = True
        deadline = _core.monotonic() + _TIME_LIMIT

        def is_over() -> bool:
            left = self.tidy(False) and bool(self._under_way)
            return not left or _core.monotonic() >= deadline

        wait_until(is_over)
        self._words.wake()

    # With the lock.

    def _again(self, key: tuple[str, int], use: int) -> bool:
        """Whether the block is used for another value than the one it was used for first."""
        first = self._seen.setdefault(key, use)
        if len(self._seen) > _REMEMBERED:
            del self._seen[next(iter(self._seen))]
        return first != use

    def _pin(self, key: tuple[str, int], buffer: _core.Buffer, device: Device) -> Block | None:
        until, pause = self._refused.get(device.kind, (0.0, _PAUSES[0]))
        if _core.monotonic() < until or not self._has_capacity():
            return None
        # Somebody is to give it up again: where no thread is to be had, nothing is pinned.
        with suppress(OSError):
            self._start()
            mark = self._words.mark(buffer)
            if mark is None:
                return None
            block = Block(device, mark)
            # Before it is pinned: what is raised meanwhile must not have the mark go.
            self._blocks[key] = block
            try:
                if buffer.address + buffer.nbytes > block.end:
                    raise ValueError("a value lies outside of its block")
                device.pin(mark.address, mark.nbytes)
            except Exception as error:
                del self._blocks[key]
                mark.release()
                if device.kind not in self._refused:
                    _logger().info(
                        "the device %r does not pin shared memory (%s): values are copied to memory that "
                        "it has pinned, and from there",
                        device.kind,
                        error,
                    )
                self._refused[device.kind] = _core.monotonic() + pause, min(2 * pause, _PAUSES[1])
                return None
            self._refused.pop(device.kind, None)
            self._seen.pop(key, None)
            self._words.hold(True)
            self._look_within(self._idle)
            return block
        return None

    def _unpin(self, key: tuple[str, int]) -> bool:
        """Unpin a block, and return whether that worked. A block that a device does not let go of stays
        marked, for good."""
        block = self._blocks[key]
        try:
            block.device.unpin(block.begin)
        except Exception as error:
            _logger().warning("the device %r does not unpin memory: %s", block.device.kind, error)
            block.copies += 1
            return False
        block.mark.release()
        del self._blocks[key]
        self._words.hold(bool(self._blocks or self._under_way))
        return True

    def _has_capacity(self) -> bool:
        """Whether one block more may be pinned; the one that was used longest ago gives way."""
        if len(self._blocks) < MOST:
            return True
        idle = [key for key, block in self._blocks.items() if block.copies == 0]
        return bool(idle) and self._unpin(min(idle, key=lambda key: self._blocks[key].used))

    def _sweep(self) -> None:
        # A signal handler may get a value, and so come here, in the middle of it: each is counted down by
        # who has taken it out of the list, in one step.
        for copy in list(self._under_way):
            event, _, use = copy
            if happened(event) and _taken_out(self._under_way, copy):
                use.end()

    def _look_within(self, seconds: float) -> None:
        """Have the thread look that soon. It is woken only where it would come much too late."""
        due = _core.monotonic() + seconds
        if self._look == 0.0 or self._look > due + _LOOK:
            self._look = due
            self._words.wake()


def _logger() -> logging.Logger:
    import logging  # few processes need it

    return logging.getLogger("conveyor")


def over(address: int, nbytes: int) -> torch.Tensor:
    """Make a tensor of bytes over memory that somebody else keeps."""
    import ctypes  # few processes need it

    import torch

    return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)


_current: Pinned | None = None


def current() -> Pinned | None:
    """Find this process's. ``None``: it has no session."""
    return _current


def set_current(pinned: Pinned | None) -> None:
    """Set the registry of this process from now on."""
    global _current
    _current = pinned


def _taken_out(some: list[_UnderWay], one: _UnderWay) -> bool:
    """Remove a copy from the list, and return whether it was still there."""
    try:
        some.remove(one)
    except ValueError:
        return False
    return True


_UnderWay = tuple[Event, "_core.Buffer", Use]


STAGED = "staged"
"""Among the notes: the :class:`Staged` of the value that is pickled."""

#: Buffers of a frame lie at multiples of this.
_ALIGN = 64
#: Most bytes of the host's buffers that are copied to the block with the GIL.
_OUT_OF_BAND = 1 << 20


class Staged:
    """A value's tensors of devices, whose bytes are fetched when it has been pickled.

    framed: the value is sent in a frame, with a block of the arena.
    """

    def __init__(self, framed: bool) -> None:
        self._framed = framed
        #: With what stands for each, and the stream that its values come on.
        self._tensors: dict[int, tuple[bytearray, torch.Tensor, Stream]] = {}
        self._streams: list[Stream] = []

    def buffer(self, tensor: torch.Tensor) -> pickle.PickleBuffer:
        """Return a stand-in for the bytes of a contiguous tensor of a device until :meth:`finish`."""
        placeholder = bytearray()  # writable, as a tensor is
        device = devices.of(tensor)
        assert device is not None
        self._tensors[id(placeholder)] = (
            placeholder,
            tensor,
            device.current_stream(tensor.device.index),
        )
        return pickle.PickleBuffer(placeholder)

    def finish(self, buffers: list[Any]) -> None:
        """Put the tensors' bytes in the places of what stands for them. Wait until they are there.

        Raises:
            SerializationError: something has gone wrong on a device.
        """
        positions = [
            position for position, buffer in enumerate(buffers) if id(buffer.obj) in self._tensors
        ]
        if not positions:
            return
        tensors = {position: self._tensors[id(buffers[position].obj)][1:] for position in positions}
        sizes = [tensor.nbytes for tensor, _ in tensors.values()]
        block = self._block(sizes, [b for b in buffers if id(b.obj) not in self._tensors])
        if block is not None:
            return self._fill(block, buffers, tensors)
        here = [self._take(tensor, stream) for tensor, stream in tensors.values()]
        self._synchronize()
        for position, copied in zip(positions, here, strict=True):
            buffers[position] = memoryview(copied.numpy())

    def _take(self, tensor: torch.Tensor, stream: Stream) -> torch.Tensor:
        here = stream.device.empty_pinned(tensor.nbytes)
        self._copy(here, tensor, stream)
        return here

    def _copy(self, target: torch.Tensor, tensor: torch.Tensor, stream: Stream) -> None:
        self._streams.append(stream)
        with stream.device.using(stream):
            stream.device.copy(target, _bytes_of(tensor))

    def _block(self, sizes: Sequence[int], others: Sequence[Any]) -> _core.Buffer | None:
        """Memory of the arena for all buffers of a frame. ``None``: it is to be copied there later."""
        process = current() if self._framed else None
        nbytes = sum(map(_aligned, sizes))
        if process is None or nbytes < LEAST:
            return None
        others_size = sum(_aligned(other.nbytes) for other in others)
        if others_size > min(nbytes, _OUT_OF_BAND):
            return None
        return process.allocate(nbytes + others_size)

    def _fill(
        self,
        block: _core.Buffer,
        buffers: list[Any],
        tensors: dict[int, tuple[torch.Tensor, Stream]],
    ) -> None:
        process = current()
        assert process is not None
        kinds: dict[str, Use | None] = {}
        by_the_way: list[tuple[torch.Tensor, torch.Tensor]] = []
        at = 0
        try:
            for position, buffer in enumerate(buffers):
                if position not in tensors:
                    part = buffers[position] = block.part(at, buffer.nbytes)
                    at += _aligned(buffer.nbytes)
                    memoryview(part)[:] = buffer
                    continue
                tensor, stream = tensors[position]
                part = buffers[position] = block.part(at, tensor.nbytes)
                at += _aligned(tensor.nbytes)
                device, target = stream.device, over(part.address, tensor.nbytes)
                if device.kind not in kinds:
                    kinds[device.kind] = process.take(block, device)
                if kinds[device.kind] is None:
                    by_the_way.append((target, self._take(tensor, stream)))
                else:
                    self._copy(target, tensor, stream)
            self._synchronize()
        except BaseException:
            # No device may write there any more when the block is another value's.
            self._calm()
            raise
        finally:
            for use in kinds.values():
                if use is not None:
                    process.give_back(use)
        for target, here in by_the_way:
            target.copy_(here)

    def _synchronize(self) -> None:
        for stream in self._streams:
            try:
                stream.synchronize()
            except Exception as error:  # a simulated kernel's may be any
                raise SerializationError(
                    f"the device {stream.device.kind}:{stream.index} has failed before a tensor of it could "
                    f"be sent: {type(error).__name__}: {error}"
                ) from error
        self._streams.clear()

    def _calm(self) -> None:
        for stream in self._streams:
            with suppress(Exception):  # one error is enough
                stream.synchronize()
        self._streams.clear()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, whatever its shape."""
    import torch

    storage = tensor.untyped_storage()
    begin = tensor.storage_offset() * tensor.element_size()
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(storage, begin, (tensor.nbytes,), (1,))


def check(on: torch.Tensor | torch.UntypedStorage) -> None:
    """Refuse tensors of devices that have no values, or that nobody knows how to copy."""
    kind = on.device.type
    if kind == "meta":
        raise SerializationError(
            "a tensor on device 'meta' has no values that could be sent: send its shape and dtype, or "
            "make it on a real device (torch.empty_like(x, device='cpu'))"
        )
    if kind != "cpu" and devices.get(kind) is None:
        raise SerializationError(
            f"a tensor on device {str(on.device)!r} cannot be sent: nobody has registered devices of this "
            f"kind (conveyor.device.register); call .cpu() on it, or use a tensor transport for this edge"
        )


def target_device(on: torch.Tensor | torch.UntypedStorage, kind: str) -> tuple[Device, str | None]:
    """Say where the reader puts what is ``on`` a device here, if it is to be on one of this kind: on the same
    one, if that is of this kind."""
    device = devices.get(kind)
    if device is None:
        raise SerializationError(
            f"a tensor is to be on a device of the kind {kind!r}, which nobody has registered here "
            f"(conveyor.device.register)"
        )
    return device, device.identity(on.device.index) if on.device.type == kind else None


_found: set[str] = set()


def moved_to(made: torch.Tensor, device: Device, identity: str | None) -> torch.Tensor:
    """Put a tensor of the host on the device of that identity, if this process has it; on its current one
    otherwise. A tensor that was on such a device stays in memory of the host where there is none.

    Raises:
        SerializationError: this process has no device of the kind, where the tensor was asked to be.
    """
    if not _usable(device, identity):
        return made
    index = _index_of(device, identity)
    if not made.numel():
        return device.empty(0, index).view(made.dtype).as_strided(made.shape, made.stride())
    once = unexpanded(made)
    strides = once.stride()
    flat = once.permute(sorted(range(once.ndim), key=lambda i: -strides[i])).reshape(-1)
    pinned = device.empty_pinned(flat.numel() * flat.element_size())
    pinned.view(made.dtype).copy_(flat)
    there = device.empty(pinned.numel(), index)
    device.copy(there, pinned)
    return there.view(made.dtype).as_strided(once.shape, strides).expand(made.shape)


def fetch_bytes(buffer: Any, device: Device, identity: str | None) -> torch.Tensor | None:
    """Copy what came in a frame to the device, from where it lies: a tensor of bytes there, for the current
    stream. ``None``: that memory is not pinned, or the tensor stays in memory of the host.

    Raises:
        SerializationError: this process has no device of the kind.
    """
    process = current()
    if process is None or not _usable(device, identity):
        return None
    use = process.take(buffer, device)
    if use is None:
        return None
    enqueued = False
    try:
        index = _index_of(device, identity)
        there = device.empty(buffer.nbytes, index)
        enqueued = True  # before: a handler may raise when it is, and has not returned
        device.copy(there, over(buffer.address, buffer.nbytes))
        process.hold(device.current_stream(index).record(), buffer, use)
        return there
    except BaseException:
        if enqueued:  # the block must not be another value's while the device reads it
            device.synchronize(index)
        process.give_back(use)
        raise


def _usable(device: Device, identity: str | None) -> bool:
    """Whether there is a device of the kind here. ``identity``: where the tensor was; ``None``: elsewhere,
    and it was asked to be on such a device."""
    kind = device.kind
    if kind not in _found:
        why_not = device.viable()
        if why_not is not None:
            if identity is not None:
                _tell_once(kind, why_not)
                return False
            raise SerializationError(
                f"a tensor that is to be on a device of the kind {kind!r} has come to a process that has "
                f"none ({why_not}): call .cpu() on it before it is sent, or mark its node with "
                f"with_tensor_transport(device='cpu')"
            )
        _found.add(kind)
    return True


@functools.cache
def _tell_once(kind: str, why: str) -> None:
    import logging  # slow to import, and rarely needed

    logging.getLogger("conveyor").warning(
        "tensors of devices of the kind %r that come to this process stay in memory of the host, since it "
        "has no such device: %s",
        kind,
        why,
    )


def _index_of(device: Device, identity: str | None) -> int:
    if identity is not None:
        for index in range(device.count()):
            if device.identity(index) == identity:
                return index
    return device.current_index()


def fetched(contiguous: torch.Tensor) -> pickle.PickleBuffer:
    """The bytes of a tensor of a device, at once."""
    alone = Staged(framed=False)
    buffers: list[Any] = [alone.buffer(contiguous).raw()]
    alone.finish(buffers)
    return pickle.PickleBuffer(buffers[0])
