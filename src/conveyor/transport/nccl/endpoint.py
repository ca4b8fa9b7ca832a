"""Endpoint of an edge whose tensors go over NCCL: gloo's, with other pairs and with memory of a device.

All work of NCCL is enqueued on streams of the pairs, with and without overlap. A send that nobody receives
blocks its stream: on the program's stream, two actors that send to each other would wait for each other. And
a blocked stream must be ended by a thread that does not wait for it. So the thread of a link waits, and a
reader's task begins when its tensors are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from conveyor.device import Device, Event, Stream
from conveyor.device.base import wait_until
from conveyor.flag import Flag
from conveyor.transport.base import Enqueued, Wire
from conveyor.transport.gloo.endpoint import GlooEndpoint, Mover
from conveyor.transport.gloo.pairs import PairAddresses, Rendezvous
from conveyor.transport.nccl.group import Group
from conveyor.transport.packing import Layout

_ID, _READY = "id", "ready"


class _Buffer(NamedTuple):
    """Memory of the device, and the event behind the work that must be done before the memory is used."""

    memory: Any
    device: int
    before: Event


class NcclPair:
    """Pair of ranks over NCCL: moves bytes for one end of a link."""

    def __init__(
        self,
        device: Device,
        groups: type[Group],
        rendezvous: Rendezvous,
        pair_addresses: PairAddresses,
    ) -> None:
        """Meet the other end. Nothing is done with the group before a transfer needs it."""
        rank = pair_addresses.rank
        groups.go_by(pair_addresses.addresses[rank])
        self._device = device
        self._groups = groups
        self._rank = rank
        self._cut = Flag()
        self._group: Group | None = None
        self._stream: Any = None
        if rank == 0:
            rendezvous.set(_ID, groups.new_identity())
            rendezvous.wait([_READY])
        else:
            rendezvous.set(_READY, b"1")
        self._identity = rendezvous.get(_ID)

    def send(self, buffer: _Buffer) -> None:
        """Send the memory, and wait until it has been sent."""
        self._connected(buffer.device).send(self._behind(buffer), self._stream)
        self._finish()

    def receive(self, buffer: _Buffer) -> None:
        """Fill the memory, and wait until it is filled."""
        self._connected(buffer.device).receive(self._behind(buffer), self._stream)
        self._finish()

    def cut(self) -> None:
        """Abort the group, and make a wait at this end stop at once, with an error. Any thread may call
        this."""
        self._cut.set()
        group = self._group
        if group is not None:
            group.abort()

    def close(self) -> None:
        """Let go of the group."""
        self.cut()
        self._group = None

    def _connected(self, index: int) -> Group:
        """Return the group, and make it at the first transfer, on that transfer's device."""
        if self._group is None:
            self._stream = self._device.new_stream(index, urgent=True)
            self._group = self._groups(self._device, index, self._identity, self._rank)
            if self._cut.is_set():
                self._group.abort()
            self._group.connect()
        return self._group

    def _behind(self, buffer: _Buffer) -> Any:
        self._stream.wait_event(buffer.before)
        self._device.keep(buffer.memory, self._stream)
        return buffer.memory

    def _finish(self) -> None:
        """Wait for the stream, unless the pair is cut."""
        wait_until(self._stream.record().query, self._cut.wait)
        if self._cut.is_set():
            raise ConnectionAbortedError("the group is not wanted any more")


class NcclEndpoint(GlooEndpoint):
    """Endpoint of an edge over NCCL, the writer's or a reader's."""

    thread = "nccl"

    def __init__(self, wire: Wire, device: Device, groups: type[Group]) -> None:
        why_not = device.viable() or groups.missing()
        if why_not is not None:
            raise RuntimeError(f"there is no NCCL here: {why_not}")
        self._device = device
        self._groups = groups
        #: By the device, the stream for which memory to fill is made. Nothing else is enqueued there.
        self._fill_streams: dict[int, Stream] = {}
        super().__init__(wire)

    def make_pair(self, rendezvous: Rendezvous, pair_addresses: PairAddresses) -> Mover:
        """Make the pair of ranks that moves bytes for one end of a link. The link's thread calls this."""
        return NcclPair(self._device, self._groups, rendezvous, pair_addresses)

    def addresses_to(self, other: int) -> PairAddresses:
        """Find the way to another end, by its rank. The writer is always rank 0, since it makes the identity:
        NCCL does not care which address is the greater."""
        own = self._wire.rank
        hosts = self._wire.hosts
        if not hosts:
            return PairAddresses(("", ""), 0 if own == 0 else 1)
        ends = (own, other) if own == 0 else (other, own)
        return PairAddresses((hosts[ends[0]].address, hosts[ends[1]].address), 0 if own == 0 else 1)

    def stage(self, layout: Layout, tensors: Sequence[Any]) -> Any:
        """Enqueue the copy on the program's stream, since the program's next task may write to the
        tensors."""
        device, index = self._device, tensors[0].device.index or 0
        program = device.current_stream(index)
        with device.using(program):
            memory = device.empty(layout.size, index)
            layout.fill(memory, tensors)
        return _Buffer(memory, index, program.record())

    def allocate(self, size: int) -> Any:
        """Make memory on the current device, which need not wait for what the program has enqueued."""
        device, index = self._device, self._device.current_index()
        if index not in self._fill_streams:
            self._fill_streams[index] = device.new_stream(index)
        stream = self._fill_streams[index]
        with device.using(stream):
            return _Buffer(device.empty(size, index), index, stream.record())

    def open(self, layout: Layout, buffer: Any) -> Any:
        """Make the reader's tensors from memory that is filled."""
        memory, index, _ = buffer

        def join() -> None:
            self._device.keep(memory, self._device.current_stream(index))

        return Enqueued(layout.open(memory), join)
