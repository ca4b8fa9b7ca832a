"""Base class of transports that a user writes, which move a part of values that stay with their actors."""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from conveyor import descriptors
from conveyor.codec.faults import message_of

_log = logging.getLogger("conveyor")


def in_words(error: BaseException) -> str:
    """An error's class and message, whatever its class does."""
    return f"{type(error).__name__}: {message_of(error)}"


def abort(manager: TensorTransportManager, transport: str, obj_id: str, communicator: Any) -> None:
    """Have this end of a transfer raise soon, if it can: the other one has failed, which is told already."""
    try:
        if manager.can_abort_transport():
            manager.abort_transport(obj_id, communicator)
    except Exception:
        _log.warning(
            "process %d: abort_transport() of the transport %r has failed",
            os.getpid(),
            transport,
            exc_info=True,
        )


class Ended:
    """End of a thread, as a descriptor that others can wait for.

    over: a descriptor that is readable after the end; -1 once nobody waits for it any more.
    """

    def __init__(self) -> None:
        self.over, end = map(descriptors.own, os.pipe())
        #: Empty when the thread has ended. Who takes it out, in one step, is who closes it: whoever starts
        #: the thread may be interrupted, and then does not know whether there is one.
        self._end = [end]

    @property
    def has_ended(self) -> bool:
        """Whether the thread has ended."""
        return not self._end

    def tell(self) -> None:
        """Tell that the thread ends."""
        end = self._end.pop()
        try:
            with suppress(OSError):  # nobody waits for it
                os.write(end, b".")  # a forked child may have this end, too
        finally:
            os.close(end)

    def close(self) -> None:
        """Stop waiting for the end."""
        over, self.over = self.over, -1
        if over >= 0:
            os.close(over)

    def __del__(self) -> None:
        # A thread that is there has this, too: there is none.
        self.close()
        while self._end:
            os.close(self._end.pop())


@dataclass
class TensorTransportMetadata:
    """Description of a value for the consumer. To be subclassed; it is pickled.

    tensor_meta: shape and dtype of each tensor.
    tensor_device: the kind of device that they are on, or the device itself.
    """

    tensor_meta: list[tuple[Any, Any]] = field(default_factory=list)
    tensor_device: Any = None


@dataclass
class CommunicatorMetadata:
    """Description of one transfer for both of its ends. To be subclassed; it is pickled."""


@dataclass
class FetchRequest:
    """A fetch that has been started. To be subclassed: what has to be cleaned up belongs into ``__del__``.

    obj_id: of the value.
    tensors: what has come.
    """

    obj_id: str
    tensors: list[Any] = field(default_factory=list)


class TensorTransportManager(ABC):
    """Moves what is taken out of values that stay with their actors: tensors, or values of any one type.

    There is one instance in each process that needs one, made without arguments when it is first needed. Its
    methods are called by several threads at a time.

    ``obj_id`` is the name of a value: 16 hexadecimal digits, the same in all processes, and in no use for
    another value of any session.
    """

    @abstractmethod
    def tensor_transport_backend(self) -> str:
        """The transport's name."""

    @staticmethod
    @abstractmethod
    def is_one_sided() -> bool:
        """Whether the consumer fetches alone. Else :meth:`send_multiple_tensors` runs in the producer's
        process meanwhile, on a thread of its own: no method of the actor's delays it."""

    @staticmethod
    @abstractmethod
    def can_abort_transport() -> bool:
        """Whether :meth:`abort_transport` has an effect."""

    @abstractmethod
    def actor_has_tensor_transport(self, actor: Any) -> bool:
        """Whether an actor can use it. Called by whoever calls a method of that, before it is called."""

    @abstractmethod
    def extract_tensor_transport_metadata(
        self, obj_id: str, tensors: list[Any]
    ) -> TensorTransportMetadata:
        """Let others have what was taken out of a value, in the process that has made it, as soon as it is
        there. What this raises is the call's error, and nothing is kept."""

    @abstractmethod
    def get_communicator_metadata(
        self, src_actor: Any, dst_actor: Any, backend: str
    ) -> CommunicatorMetadata:
        """Return all that both ends need to know of one transfer; called by the consumer.

        Args:
            src_actor: the actor that has the value, as an object with a ``name`` and an ``index`` that can
                be compared; ``None``: the driver.
            dst_actor: the actor that gets the value, likewise.
            backend: the name that the transport was registered by.
        """

    @abstractmethod
    def recv_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: TensorTransportMetadata,
        communicator_metadata: CommunicatorMetadata,
        target_buffers: list[Any] | None = None,
    ) -> list[Any]:
        """Get copies of what was taken out of a value, in order. Where both ends take part, this runs on a
        thread of its own, while its caller waits."""

    @abstractmethod
    def send_multiple_tensors(
        self,
        tensors: list[Any],
        tensor_transport_metadata: TensorTransportMetadata,
        communicator_metadata: CommunicatorMetadata,
    ) -> None:
        """Send them to whoever receives, in the producer's process. Only where both ends take part."""

    @abstractmethod
    def garbage_collect(
        self,
        obj_id: str,
        tensor_transport_meta: TensorTransportMetadata,
        tensors: list[Any],
    ) -> None:
        """Let go of a value that nobody can ask for any more. Called once, in the process that has made
        it."""

    @abstractmethod
    def abort_transport(self, obj_id: str, communicator_metadata: CommunicatorMetadata) -> None:
        """Have :meth:`send_multiple_tensors` or :meth:`recv_multiple_tensors`, which runs in this process on
        another thread, raise soon: the other end has failed."""

    def fetch_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: TensorTransportMetadata,
        communicator_metadata: CommunicatorMetadata,
        target_buffers: list[Any] | None = None,
    ) -> FetchRequest:
        """Begin a fetch in which the consumer is alone. Implement it, with :meth:`wait_fetch_complete`, and
        the fetch ends with the timeout of a ``get``, and with the producer's death."""
        tensors = self.recv_multiple_tensors(
            obj_id, tensor_transport_metadata, communicator_metadata, target_buffers
        )
        return FetchRequest(obj_id, tensors)

    def wait_fetch_complete(
        self, fetch_request: FetchRequest, timeout: float = -1
    ) -> Sequence[Any]:
        """Wait until a fetch is done, for at most ``timeout`` seconds; -1: as long as it takes.

        Raises:
            TimeoutError: it is not, yet.
        """
        return fetch_request.tensors


def starts_fetches(manager: TensorTransportManager) -> bool:
    """Whether a fetch can be waited for with a timeout."""
    return type(manager).fetch_multiple_tensors is not TensorTransportManager.fetch_multiple_tensors
