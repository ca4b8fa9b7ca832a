"""A way that a user has written."""

from __future__ import annotations

import copy
import logging
import os
import socket
import sys
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from conveyor.codec import dumps_by_value, loads
from conveyor.codec.direct import Located, Route
from conveyor.codec.faults import is_of_value
from conveyor.codec.parcels import TensorSpec
from conveyor.codec.tensors.beside import Collected
from conveyor.direct.managers.hooks import in_words
from conveyor.direct.managers.manager import TensorTransportManager, TensorTransportMetadata
from conveyor.direct.managers.receiving import receive
from conveyor.direct.managers.sending import SENDER, send_by_manager
from conveyor.direct.managers.wire import Ask, Source
from conveyor.direct.memory import is_tensor
from conveyor.direct.table import TABLE
from conveyor.exceptions import ActorDiedError, SerializationError, TransportError, WaitTimeoutError
from conveyor.later import import_later
from conveyor.runtime import context

_log = logging.getLogger("conveyor")


class _Note(NamedTuple):
    """What a consumer is told.

    metadata: of the manager.
    source: where the value is.
    specs: of each tensor, where these are torch's.
    announced: how many there are.
    shapes: of each value of another type, its shape and dtype in words; ``None``: it has none.
    """

    metadata: TensorTransportMetadata
    source: Source
    specs: tuple[TensorSpec, ...]
    announced: int
    shapes: tuple[str | None, ...] = ()


class ManagerRoute(Route):
    """One of the registered transports, in this process."""

    takes_all = True

    def __init__(
        self,
        name: str,
        devices: tuple[str, ...],
        manager_class: type[TensorTransportManager],
        data_type: type | None,
    ) -> None:
        """``data_type``: ``None`` is torch's tensor."""
        self.name = name
        self._devices = devices
        self._class = manager_class
        self._type = data_type
        self.forget_manager()
        if data_type is not None:
            import_later("conveyor.codec.pickling.objects").take_out(data_type)

    def forget_manager(self) -> None:
        """This is another process now."""
        self._manager: TensorTransportManager | None = None
        self._making = threading.RLock()
        #: Values that are kept here, and have been offered.
        self._offered: set[int] = set()

    @property
    def manager(self) -> TensorTransportManager:
        """This process's."""
        made = self._manager
        if made is None:
            with self._making:
                made = self._manager
                if made is None:
                    made = self._manager = self._class()
        return made

    def collected(self) -> Collected:
        """As the base says."""
        if self._type is None:
            return Collected(_accepted)
        made: Collected = import_later("conveyor.codec.pickling.objects").CollectedObjects(
            self._type
        )
        return made

    def specs(self, tensors: list[Any]) -> Sequence[TensorSpec]:
        """They are in the note."""
        return ()

    def copied(self, tensor: Any) -> Any:
        """As the base says."""
        return tensor.clone() if self._type is None else copy.deepcopy(tensor)

    def offer(self, number: int, tensors: list[Any]) -> bytes | None:
        """As the base says.

        Raises:
            ValueError: a tensor is on a device that the transport does not move from.
        """
        manager, name = self.manager, name_of(number)
        specs: tuple[TensorSpec, ...] = ()
        if self._type is None:
            for tensor in tensors:
                self._check_device(tensor.device.type)
            specs = tuple([TensorSpec.of(tensor) for tensor in tensors])
        metadata = manager.extract_tensor_transport_metadata(name, list(tensors))
        try:
            if not isinstance(metadata, TensorTransportMetadata):
                raise TypeError(
                    f"{self._class.__name__}.extract_tensor_transport_metadata returns a "
                    f"TensorTransportMetadata, not a {type(metadata).__name__}"
                )
            device = metadata.tensor_device
            if device is not None:
                self._check_device(str(getattr(device, "type", device)).partition(":")[0].lower())
            address, key = ("", b"") if manager.is_one_sided() else SENDER.begin()
            try:
                source = Source.here(address, key)
                shapes = () if specs else tuple([_shape_of(one) for one in tensors])
                note = self._packed(_Note(metadata, source, specs, len(tensors), shapes))
            except BaseException:
                if address:
                    SENDER.end()
                raise
        except BaseException:
            self._collect(name, metadata, tensors)
            raise
        self._offered.add(number)
        return note

    def fetch(self, where: Located, specs: Sequence[TensorSpec], note: bytes) -> list[Any]:
        """As the base says.

        Raises:
            TransportError: it could not be got.
            ActorDiedError: who kept it has died.
            WaitTimeoutError: it has not come in time.
        """
        number = where.number
        stored = TABLE.find(number)
        if stored is not None and stored.beside is not None:  # a snapshot, of which each has a copy
            return [self.copied(one) for one in stored.beside.tensors]
        told: _Note = loads(note)
        source = told.source
        try:
            source.check()  # a transport may have what the dead have left
            came = receive(self.manager, self.name, name_of(number), number, told.metadata, source)
            return self._checked(came, told)
        except (ActorDiedError, WaitTimeoutError):
            raise
        except BaseException as error:
            if not is_of_value(error):
                raise  # a signal's handler has raised it
            source.check(error)
            if isinstance(error, TransportError):
                raise
            me = context.current().own_actor
            raise TransportError(
                f"{'the driver' if me is None else me.name} could not get a value that {source.name} "
                f"keeps, by the transport {self.name!r}: {in_words(error)}"
            ) from error

    def send(self, asked: socket.socket, ask: Ask, stored: Any) -> None:
        """Serve a consumer, as the process that keeps the value."""
        send_by_manager(asked, ask, stored)

    def forget(self, number: int, note: bytes, tensors: list[Any]) -> None:
        """As the base says."""
        if number not in self._offered:  # it was offered by the process that this was forked from
            return
        self._offered.discard(number)
        if sys.is_finalizing():
            return
        told: _Note = loads(note)
        if told.source.address:
            SENDER.end()
        self._collect(name_of(number), told.metadata, tensors)

    def _packed(self, note: _Note) -> bytes:
        try:
            return dumps_by_value(note)
        except SerializationError as error:
            raise TypeError(
                f"what {self._class.__name__}.extract_tensor_transport_metadata has returned cannot be sent: "
                f"{error}"
            ) from error

    def _collect(self, name: str, metadata: Any, tensors: list[Any]) -> None:
        try:
            self.manager.garbage_collect(name, metadata, list(tensors))
        except Exception:
            _log.warning(
                "process %d: garbage_collect() of the transport %r has failed",
                os.getpid(),
                self.name,
                exc_info=True,
            )

    def _check_device(self, kind: str) -> None:
        if kind not in self._devices:
            raise ValueError(
                f"the transport {self.name!r} does not support tensor transfer on device {kind!r}; it does "
                f"on {', '.join(self._devices) or 'none'}"
            )

    def _checked(self, came: Any, told: _Note) -> list[Any]:
        if not isinstance(came, (list, tuple)) or len(came) != told.announced:
            what = f"{len(came)}" if isinstance(came, (list, tuple)) else f"a {type(came).__name__}"
            raise ValueError(f"{told.announced} tensors were announced, and {what} came")
        for spec, one in zip(told.specs, came, strict=False):
            if not is_tensor(one) or str(one.layout) != "torch.strided" or one.is_meta:
                raise TypeError(f"a dense torch tensor was announced, and {_in_words(one)} came")
            other = TensorSpec.of(one)
            if (spec.dtype, spec.shape) != (other.dtype, other.shape):
                raise ValueError(
                    f"a tensor ({spec.dtype}, shape {list(spec.shape)}) was announced, and one "
                    f"({other.dtype}, shape {list(other.shape)}) came"
                )
        if told.specs:
            return [one.contiguous() for one in came]
        for shape, one in zip(told.shapes, came, strict=False):
            if shape is not None and _shape_of(one) not in (None, shape):
                raise ValueError(f"one of {shape} was announced, and one of {_shape_of(one)} came")
        for one in came:
            if self._type is not None and not isinstance(one, self._type):
                raise TypeError(
                    f"a {self._type.__name__} was announced, and a {type(one).__name__} came"
                )
        return list(came)

    def __reduce__(self) -> Any:
        return _named, (self.name,)


def _named(name: str) -> ManagerRoute:
    found: ManagerRoute = import_later("conveyor.direct.managers.registry").route_named(name)
    return found


def name_of(number: int) -> str:
    """What a manager calls a value."""
    return f"{number:016x}"


def _in_words(value: Any) -> str:
    if not is_tensor(value):
        return f"a {type(value).__name__}"
    return f"one of {value.layout} on device {str(value.device)!r}"


def _accepted(_tensor: Any) -> None:
    return None


def _shape_of(value: Any) -> str | None:
    """What arrays have of any library's."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    return None if shape is None or dtype is None else f"shape {tuple(shape)} and {dtype}"
