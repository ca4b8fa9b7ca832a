"""Transports of the user's own, by name. Whoever meets a name that it does not know asks the driver."""

from __future__ import annotations

import copy
import copyreg
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from conveyor import _core
from conveyor.codec import blamed, dumps_by_value, loads
from conveyor.codec.direct import Located, Route
from conveyor.codec.encoded import SENT, Reducer
from conveyor.codec.faults import is_of_value
from conveyor.codec.out_of_band import TensorSpec
from conveyor.codec.pickling import pickler
from conveyor.codec.tensors.collected import Collected, object_at
from conveyor.dag.hints import known_transports
from conveyor.direct.managers.manager import (
    Ended,
    TensorTransportManager,
    TensorTransportMetadata,
    abort,
    in_words,
    starts_fetches,
)
from conveyor.direct.managers.transfers import (
    DONE,
    SENDER,
    Answer,
    Ask,
    Source,
    ask,
    readable,
    receive_one,
    send_by_manager,
)
from conveyor.direct.memory import is_tensor
from conveyor.direct.store import TABLE
from conveyor.exceptions import (
    ActorDiedError,
    ConveyorError,
    SerializationError,
    SystemLimitError,
    TransportError,
    WaitTimeoutError,
)
from conveyor.later import LaterModule, import_later
from conveyor.runtime import context, threads

if TYPE_CHECKING:
    from conveyor.codec.pickling.blame import Given

# Needed for errors alone.
blame: Any = LaterModule("conveyor.codec.pickling.blame")


#: Types with a reducer that looks whether their values are taken out.
_taken_kinds: list[type] = []

#: Types that the C pickler writes without asking anybody. Nor can classes and functions be taken out.
_NEVER = (
    *(type(None), bool, int, float, complex, str, bytes, bytearray, tuple, list, dict, set),
    *(frozenset, type, type(lambda: None), type(len)),
)


class CollectedObjects(Collected):
    """The values of exactly one type that were taken out, each once."""

    def __init__(self, kind: type) -> None:
        super().__init__(lambda _: None)
        self.kind = kind
        #: By its identity, each with its position. A value may be pickled twice before it is right.
        self._positions: dict[int, tuple[Any, int]] = {}

    def wants(self, tensor: Any) -> bool:
        """Return false: no tensor is asked for its position in the usual way."""
        return False

    def take_object(self, value: Any) -> Any:
        """Reduce ``value`` to its position."""
        found = self._positions.get(id(value))
        if found is None:
            found = self._positions[id(value)] = value, len(self.tensors)
            self.tensors.append(value)
        return object_at, (found[1],)


def can_be_taken_out(kind: type) -> bool:
    """Whether the pickler asks anybody how values of exactly this type are written."""
    return kind not in _NEVER


def take_out(kind: type) -> None:
    """Have values of exactly this type taken out from now on, where somebody collects them."""
    if kind not in _taken_kinds:
        _taken_kinds.append(kind)
        pickler.drop_picklers()


def _reducers(made: dict[type, Reducer], notes: dict[Any, Any]) -> dict[type, Reducer]:
    return {kind: _reducer(kind, made.get(kind), notes) for kind in _taken_kinds}


def _reducer(kind: type, other: Reducer | None, notes: dict[Any, Any]) -> Reducer:
    def reduce(value: Any) -> Any:
        sent = notes.get(SENT)
        collected = None if sent is None else sent.collected
        if isinstance(collected, CollectedObjects) and collected.kind is kind:
            return collected.take_object(value)
        usual = other or copyreg.dispatch_table.get(kind)
        return value.__reduce_ex__(5) if usual is None else usual(value)

    return reduce


pickler.add_reducers_over(_reducers)


#: Seconds between two looks whether the producer lives.
_LOOK = 0.5
#: Seconds that an end has to raise when the other one has failed.
_GRACE = 1.0


def receive(
    manager: TensorTransportManager,
    transport: str,
    obj_id: str,
    number: int,
    metadata: Any,
    source: Source,
) -> Any:
    """Receive, by the manager, a value that ``source`` keeps.

    Raises:
        TransportError: the producer could not send, or has died.
        WaitTimeoutError: the ``get`` that this is for is over.
        Exception: of the manager.
    """
    communicator = manager.get_communicator_metadata(
        source.actor, context.current().own_actor, transport
    )
    transfer = _Transfer(manager, transport, obj_id, metadata, communicator, source)
    if source.address:
        return transfer.of_both(number)
    if starts_fetches(manager):
        return transfer.fetched()
    return transfer.received()


class _Transfer:
    def __init__(
        self,
        manager: TensorTransportManager,
        transport: str,
        obj_id: str,
        metadata: Any,
        communicator: Any,
        source: Source,
    ) -> None:
        self._manager = manager
        self._transport = transport
        self._id = obj_id
        self._metadata = metadata
        self._communicator = communicator
        self._source = source

    def received(self) -> Any:
        """On this thread."""
        return self._manager.recv_multiple_tensors(
            self._id, self._metadata, self._communicator, None
        )

    def fetched(self) -> Any:
        """Waited for in short steps."""
        manager = self._manager
        request = manager.fetch_multiple_tensors(self._id, self._metadata, self._communicator, None)
        while True:
            step = _step()
            began = _core.monotonic()
            try:
                return manager.wait_fetch_complete(request, step)
            except TimeoutError:
                if _core.monotonic() - began < step / 2:
                    raise  # it is the transport's own
            try:
                self._check()
            except BaseException:
                self._abort()
                raise

    def of_both(self, number: int) -> Any:
        """While the producer sends."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            question = Ask(number, dumps_by_value(self._communicator))
            try:
                ask(connection, self._source, question, self._look)
            except WaitTimeoutError:  # which is an OSError
                raise
            except OSError as error:
                raise self._error(f"it could not be asked: {error}") from error
            receiving = _Receiving()
            try:
                receiving.begin(self.received)
                came = self._until_over(connection, receiving)
                with suppress(OSError):
                    connection.send(DONE)
            except BaseException:
                _hang_up(connection)  # first: what the sender then does may end the receiver
                if receiving.running:
                    self._abort()
                receiving.left()
                raise
            _hang_up(connection)
            return came

    def _until_over(self, connection: socket.socket, receiving: _Receiving) -> Any:
        both: list[Any] = [connection, receiving.over]
        while True:
            ready = readable(both, self._look())
            if receiving.over in ready:
                if receiving.error is None:
                    return receiving.took()
                raise self._failed_here(connection, receiving.error)
            if connection in ready and connection in both:
                answer = receive_one(connection, Answer)
                if answer is None:
                    raise self._error("it has died, or has broken off")
                if answer.error is not None:
                    raise self._error(answer.error)
                both.remove(connection)  # it has sent all

    def _failed_here(self, connection: socket.socket, error: BaseException) -> BaseException:
        """Make the error of a receiver that has raised. The sender's error may be the cause."""
        connection.settimeout(_GRACE)
        answer = None
        with suppress(OSError):
            answer = receive_one(connection, Answer)
        said = None if answer is None else answer.error
        # What is no Exception would end more than the transfer. Nobody has pressed Ctrl-C on its thread.
        if said is None and isinstance(error, Exception):
            return error
        text = (
            f"{_me()} could not get a value by the transport {self._transport!r}: {in_words(error)}"
        )
        if said is not None:
            text += f"; {self._source.name} could not send it: {said}"
        wrapped = TransportError(text)
        wrapped.__cause__ = error
        return wrapped

    def _look(self) -> float:
        """Seconds until the next one. Raises what ends the wait."""
        self._check()
        return _step()

    def _check(self) -> None:
        if self._source.gone():
            raise self._error("it has died")
        if _core.seconds_to_fetch() == 0:
            raise WaitTimeoutError(
                f"the timeout of get() is over: a value that {self._source.name} keeps has not come by the "
                f"transport {self._transport!r}"
            )

    def _abort(self) -> None:
        abort(self._manager, self._transport, self._id, self._communicator)

    def _error(self, why: str) -> TransportError:
        return TransportError(
            f"{self._source.name} could not send a value to {_me()} by the transport {self._transport!r}: "
            f"{why}"
        )


def _step() -> float:
    left = _core.seconds_to_fetch()
    return _LOOK if left is None else min(left, _LOOK)


def _hang_up(connection: socket.socket) -> None:
    with suppress(OSError):  # closing is not enough: a forked child may have it, too
        connection.shutdown(socket.SHUT_WR)


def _me() -> str:
    me = context.current().own_actor
    return "the driver" if me is None else me.name


class _Receiving:
    """Thread that receives. If it cannot be ended, it is left running: its transfer fails, and nothing else.

    error: why it could not receive, when it has ended.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._came: Any = None
        self._ended = Ended()
        self._begun = False

    @property
    def over(self) -> int:
        """Descriptor that is readable when the thread has ended."""
        return self._ended.over

    def begin(self, receive: Callable[[], Any]) -> None:
        """Start it. A signal handler that raises meanwhile leaves open whether it has begun: then it counts
        as running."""
        self._begun = True
        try:
            threads.start(self._run, "receiving", receive)
        except SystemLimitError:
            self._begun = False
            raise

    @property
    def running(self) -> bool:
        """Whether the thread has begun, and has not ended."""
        return self._begun and not self._ended.has_ended

    def took(self) -> Any:
        """Return the received values."""
        self._ended.close()
        return self._came

    def left(self) -> None:
        """Drop the transfer: nobody wants its values any more."""
        if self.running:
            readable([self.over], _GRACE)
        self._ended.close()
        self.error = self._came = None

    def _run(self, receive: Callable[[], Any]) -> None:
        try:
            self._came = receive()
        except BaseException as error:  # a thread of ours has nobody else to tell
            self.error = error.with_traceback(None)
        finally:
            self._ended.tell()


_log = logging.getLogger("conveyor")


class _Note(NamedTuple):
    """Note to the consumer about a value.

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
    """Route of one registered transport, in this process."""

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
            take_out(data_type)

    def forget_manager(self) -> None:
        """Forget the manager, which belongs to another process: this one was forked."""
        self._manager: TensorTransportManager | None = None
        self._making = threading.RLock()
        #: Values that are kept here, and have been offered.
        self._offered: set[int] = set()

    @property
    def manager(self) -> TensorTransportManager:
        """Manager of this process, made when it is first needed."""
        made = self._manager
        if made is None:
            with self._making:
                made = self._manager
                if made is None:
                    made = self._manager = self._class()
        return made

    def collected(self) -> Collected:
        """See :meth:`Route.collected`."""
        if self._type is None:
            return Collected(_accepted)
        made: Collected = CollectedObjects(self._type)
        return made

    def specs(self, tensors: list[Any]) -> Sequence[TensorSpec]:
        """Return nothing: the specs are in the note."""
        return ()

    def copied(self, tensor: Any) -> Any:
        """See :meth:`Route.copied`."""
        return tensor.clone() if self._type is None else copy.deepcopy(tensor)

    def offer(self, number: int, tensors: list[Any]) -> bytes | None:
        """See :meth:`Route.offer`.

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
        """See :meth:`Route.fetch`.

        Raises:
            TransportError: it could not be got.
            ActorDiedError: the process that kept it has died.
            WaitTimeoutError: it has not come in time.
        """
        number = where.number
        stored = TABLE.find(number)
        if (
            stored is not None and stored.out_of_band is not None
        ):  # a snapshot, of which each has a copy
            return [self.copied(one) for one in stored.out_of_band.tensors]
        announcement: _Note = loads(note)
        source = announcement.source
        try:
            source.check()  # a transport may have what the dead have left
            came = receive(
                self.manager, self.name, name_of(number), number, announcement.metadata, source
            )
            return self._checked(came, announcement)
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

    def send(self, connection: socket.socket, ask: Ask, stored: Any) -> None:
        """Serve a consumer, as the process that keeps the value."""
        send_by_manager(connection, ask, stored)

    def forget(self, number: int, note: bytes, tensors: list[Any]) -> None:
        """See :meth:`Route.forget`."""
        if number not in self._offered:  # it was offered by the process that this was forked from
            return
        self._offered.discard(number)
        if sys.is_finalizing():
            return
        announcement: _Note = loads(note)
        if announcement.source.address:
            SENDER.end()
        self._collect(name_of(number), announcement.metadata, tensors)

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

    def _checked(self, came: Any, announcement: _Note) -> list[Any]:
        if not isinstance(came, (list, tuple)) or len(came) != announcement.announced:
            what = f"{len(came)}" if isinstance(came, (list, tuple)) else f"a {type(came).__name__}"
            raise ValueError(f"{announcement.announced} tensors were announced, and {what} came")
        for spec, one in zip(announcement.specs, came, strict=False):
            if not is_tensor(one) or str(one.layout) != "torch.strided" or one.is_meta:
                raise TypeError(f"a dense torch tensor was announced, and {_in_words(one)} came")
            other = TensorSpec.of(one)
            if (spec.dtype, spec.shape) != (other.dtype, other.shape):
                raise ValueError(
                    f"a tensor ({spec.dtype}, shape {list(spec.shape)}) was announced, and one "
                    f"({other.dtype}, shape {list(other.shape)}) came"
                )
        if announcement.specs:
            return [one.contiguous() for one in came]
        for shape, one in zip(announcement.shapes, came, strict=False):
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
    found: ManagerRoute = route_named(name)
    return found


def name_of(number: int) -> str:
    """Format the number of a value as a manager's name for it."""
    return f"{number:016x}"


def _in_words(value: Any) -> str:
    if not is_tensor(value):
        return f"a {type(value).__name__}"
    return f"one of {value.layout} on device {str(value.device)!r}"


def _accepted(_tensor: Any) -> None:
    return None


def _shape_of(value: Any) -> str | None:
    """Return shape and dtype of an array of any library, in words; ``None``: the value has none."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    return None if shape is None or dtype is None else f"shape {tuple(shape)} and {dtype}"


#: Names that mean something else.
_TAKEN = ("object_store",)


class _Registration(NamedTuple):
    """Registration of a transport, as it is sent to a process that asks for it."""

    name: str
    devices: tuple[str, ...]
    manager_class: type[TensorTransportManager]
    data_type: type | None


#: By the name in lower case. ``None``: it is no transport of a user's.
_routes: dict[str, ManagerRoute | None] = {}


def register_tensor_transport(
    name: str,
    devices: Sequence[str],
    manager_class: type[TensorTransportManager],
    data_type: type | None = None,
) -> None:
    """Have ``tensor_transport=name`` be a transport of your own. It is enough to register it in one process
    of the session; actors that live already know it, too.

    Args:
        name: in any case.
        devices: the kinds of device whose tensors it moves: ``["cpu"]``, ``["cuda"]``.
        manager_class: what moves them. It may be a class of ``__main__``.
        data_type: what it moves: values of exactly this type, wherever they are in what a method returns;
            without it, torch tensors.

    Raises:
        TypeError: the name is no text, ``devices`` no list of texts, or ``data_type`` no type.
        ValueError: there is a transport of that name, ``manager_class`` is no ``TensorTransportManager``,
            ``devices`` is empty, or values of ``data_type`` cannot be taken out of others (a list, say).
        SerializationError: ``manager_class`` cannot be sent to other processes.
    """
    given: Any = name, manager_class
    if not isinstance(given[0], str) or not name:
        raise TypeError(f"the name of a transport is a text, not {name!r}")
    key = name.lower()
    import_later("conveyor.transport.registry")  # it knows more names
    taken = {one.lower() for one in known_transports}.union(_TAKEN)
    if key in taken or _routes.get(key) is not None:
        raise ValueError(f"there is a transport {name!r} already")
    if not isinstance(given[1], type) or not issubclass(given[1], TensorTransportManager):
        raise ValueError(f"manager_class is no TensorTransportManager, but {manager_class!r}")
    missing = sorted(getattr(manager_class, "__abstractmethods__", ()))
    if missing:
        raise ValueError(f"{manager_class.__name__} lacks {', '.join(missing)}")
    registration = _Registration(key, _kinds(devices), manager_class, _checked(data_type))
    try:
        pickled = dumps_by_value(registration)
    except SerializationError as error:
        raise blamed(error, _of_class(manager_class)) from error.__cause__
    runtime = context.running()
    if runtime is None:
        context.add_transport(key, pickled)
    else:
        runtime.add_transport(key, pickled)
    _routes[key] = ManagerRoute(*registration)


def _kinds(devices: Any) -> tuple[str, ...]:
    if isinstance(devices, str):
        raise ValueError(f"devices is a list of kinds of device, not the text {devices!r}")
    if not isinstance(devices, Iterable):
        raise TypeError(f"devices is a list of kinds of device, not {devices!r}")
    kinds = tuple(devices)
    if not kinds:
        raise ValueError("devices names no kind of device: ['cpu'], for example")
    for one in kinds:
        if not isinstance(one, str):
            raise TypeError(f"devices has something that names no kind of device: {one!r}")
    return tuple([one.lower() for one in kinds])


def _of_class(manager_class: type) -> Iterator[Given]:
    yield blame.Given.definition("manager_class", manager_class)


def _checked(data_type: Any) -> type | None:
    """Check the type of the values to be moved. ``None`` stands for torch tensors, for which torch need not
    be imported yet."""
    if data_type is None:
        return None
    if not isinstance(data_type, type):
        raise TypeError(f"data_type is a type, not {data_type!r}")
    if data_type.__module__ == "torch" and data_type.__name__ == "Tensor":
        return None
    if not can_be_taken_out(data_type):
        raise ValueError(f"values of the type {data_type.__name__} are not taken out of others")
    return data_type


def route(name: str) -> ManagerRoute | None:
    """The transport of that name; ``None``: it is none that a user has registered."""
    key = name.lower()
    try:
        return _routes[key]
    except KeyError:
        pass
    runtime = context.running()
    pickled = context.TRANSPORTS.get(key) if runtime is None else runtime.find_transport(key)
    found = None if pickled is None else ManagerRoute(*loads(pickled))
    if runtime is not None:
        # Of two threads that ask the first gives all others its own.
        found = _routes.setdefault(key, found)
    return found


def is_known(name: str) -> bool:
    """Whether a transport is registered by that name, as far as this process can find out."""
    key = name.lower()
    if _routes.get(key) is not None:
        return True
    # It may have been registered since somebody asked.
    _routes.pop(key, None)
    return route(key) is not None


def route_named(name: str) -> ManagerRoute:
    """The transport of a value that was kept by it.

    Raises:
        ConveyorError: nobody here knows it.
    """
    found = route(name)
    if found is None:
        raise ConveyorError(f"no transport is registered as {name!r} in this process's session")
    return found


def is_two_sided(name: str) -> bool:
    """Whether it is a user's transport in which both ends take part."""
    found = None if name in known_transports else route(name)
    return found is not None and not found.manager.is_one_sided()


def check_has_transport(actor: Any, name: str) -> None:
    """Raise unless an actor can use the transport, which may be any.

    Raises:
        ValueError: it cannot.
    """
    if name in known_transports:
        return
    found = route(name)
    if found is not None and not found.manager.actor_has_tensor_transport(actor):
        raise ValueError(f"{actor!r} does not have tensor transport {name.upper()} available")


def _forget_in_child() -> None:
    """Forget the managers in a forked child, which has its own."""
    for one in _routes.values():
        if one is not None:
            one.forget_manager()


os.register_at_fork(after_in_child=_forget_in_child)
