"""Asking the driver, from an actor's process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from conveyor.exceptions import ActorDiedError, ConveyorError, RuntimeStateError
from conveyor.runtime.actor.requests import (
    Done,
    Failed,
    Notice,
    Reply,
    Request,
    WhyDead,
    WhyRefused,
)
from conveyor.runtime.message import Message
from conveyor.runtime.protocol import ActorId
from conveyor.runtime.refs.messages import receive_message, send_message


class RequestClient:
    """One request at a time, each answered before the next."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._lock = threading.Lock()
        self._sending = threading.Lock()  # to be taken last

    def ask(self, request: Request) -> tuple[Any, list[int]]:
        """The answer, and the descriptors that came with it. Raises what the driver answers with if that is
        an error."""
        reply: Reply
        with self._lock:
            try:
                self._send(request)
                reply, fds = receive_message(self._socket)
            except OSError as error:
                # The answer may still come, and is not that to the next request.
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
                raise RuntimeStateError(f"the driver does not answer: {error}") from error
        if isinstance(reply, Failed):
            raise reply.error
        assert isinstance(reply, Done)
        return reply.value, fds

    def refusal(self, actor: ActorId, number: int) -> ConveyorError:
        """Why ``actor`` does not take the calls that come over link ``number``."""
        error, _ = self.ask(WhyRefused(number))
        if isinstance(error, ConveyorError):
            return error
        return RuntimeStateError(f"{actor.name} does not take calls from here")

    def tell(self, notice: Notice) -> None:
        """Say something that has no answer. It waits for no request that is under way: the driver may
        need this before it can answer that one."""
        with suppress(ConnectionError):  # the driver is gone, and with it who should know
            self._send(notice)

    def _send(self, message: Message) -> None:
        with self._sending:
            send_message(self._socket, message)

    def death(
        self,
        actor: ActorId,
        slot: int,
        incarnation: int,
        labels: Mapping[tuple[int, int], str] | None = None,
    ) -> ActorDiedError:
        """Of the actor's process that had this slot as its ``incarnation``-th. ``labels`` are names for
        what it may have run, by (graph, node)."""
        try:
            error, _ = self.ask(WhyDead(actor, slot, incarnation, labels or {}))
        except ConveyorError:
            return ActorDiedError(f"actor {actor.name} died", actor.name)
        assert isinstance(error, ActorDiedError)
        return error
