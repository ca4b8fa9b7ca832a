"""The consumer's part of a transfer."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from conveyor import _core
from conveyor.codec import dumps_by_value
from conveyor.direct.managers.ended import Ended
from conveyor.direct.managers.hooks import abort, in_words
from conveyor.direct.managers.manager import TensorTransportManager, starts_fetches
from conveyor.direct.managers.wire import DONE, Answer, Ask, Source, ask, readable, receive_one
from conveyor.exceptions import SystemLimitError, TransportError, WaitTimeoutError
from conveyor.runtime import context, threads

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
    """What the manager gets of a value that ``source`` keeps.

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
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asked:
            question = Ask(number, dumps_by_value(self._communicator))
            try:
                ask(asked, self._source, question, self._look)
            except WaitTimeoutError:  # which is an OSError
                raise
            except OSError as error:
                raise self._error(f"it could not be asked: {error}") from error
            receiving = _Receiving()
            try:
                receiving.begin(self.received)
                came = self._until_over(asked, receiving)
                with suppress(OSError):
                    asked.send(DONE)
            except BaseException:
                _hang_up(asked)  # first: what the sender then does may end the receiver
                if receiving.running:
                    self._abort()
                receiving.left()
                raise
            _hang_up(asked)
            return came

    def _until_over(self, asked: socket.socket, receiving: _Receiving) -> Any:
        both: list[Any] = [asked, receiving.over]
        while True:
            ready = readable(both, self._look())
            if receiving.over in ready:
                if receiving.error is None:
                    return receiving.took()
                raise self._failed_here(asked, receiving.error)
            if asked in ready and asked in both:
                answer = receive_one(asked, Answer)
                if answer is None:
                    raise self._error("it has died, or has broken off")
                if answer.error is not None:
                    raise self._error(answer.error)
                both.remove(asked)  # it has sent all

    def _failed_here(self, asked: socket.socket, error: BaseException) -> BaseException:
        """The error of a receiver that has raised. The sender's may be why."""
        asked.settimeout(_GRACE)
        answer = None
        with suppress(OSError):
            answer = receive_one(asked, Answer)
        said = None if answer is None else answer.error
        # What is no Exception would end more than the transfer. Nobody has pressed Ctrl-C on its thread.
        if said is None and isinstance(error, Exception):
            return error
        text = (
            f"{_me()} could not get a value by the transport {self._transport!r}: {in_words(error)}"
        )
        if said is not None:
            text += f"; {self._source.name} could not send it: {said}"
        told = TransportError(text)
        told.__cause__ = error
        return told

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


def _hang_up(asked: socket.socket) -> None:
    with suppress(OSError):  # closing is not enough: a forked child may have it, too
        asked.shutdown(socket.SHUT_WR)


def _me() -> str:
    me = context.current().own_actor
    return "the driver" if me is None else me.name


class _Receiving:
    """A thread that receives. One that cannot be ended is left: then its transfer fails, and nothing else.

    error: why it could not, when it has ended.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._came: Any = None
        self._ended = Ended()
        self._begun = False

    @property
    def over(self) -> int:
        """A descriptor that is readable when it has ended."""
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
        """Whether it has begun, and has not ended."""
        return self._begun and not self._ended.told

    def took(self) -> Any:
        """What has come."""
        self._ended.close()
        return self._came

    def left(self) -> None:
        """Nobody wants it any more."""
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
