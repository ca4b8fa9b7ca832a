"""Tensors of devices that come by way of the host, where the consumer cannot open the keeper's memory: it
sees another device, as where each actor has a card, or none.

The consumer asks at the socket at which managers' values are asked for (``managers/sending.py``). A thread of
the keeper's copies the tensors to memory of the host, and sends their bytes.
"""

from __future__ import annotations

import functools
import logging
import math
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from conveyor import _core
from conveyor.codec.direct import Located
from conveyor.codec.out_of_band import TensorSpec
from conveyor.device import Event
from conveyor.direct.managers.manager import in_words
from conveyor.direct.managers.wire import Answer, Ask, Source, ask, readable, receive_one, send_one
from conveyor.exceptions import TransportError, WaitTimeoutError
from conveyor.runtime import context

if TYPE_CHECKING:
    import torch

_log = logging.getLogger("conveyor")

#: Seconds between two looks whether the keeper lives.
_LOOK = 0.5


def send(asked: socket.socket, tensors: Sequence[Any], filled: Sequence[Event]) -> None:
    """Send the bytes of tensors whose values are there when all of ``filled`` has happened."""
    try:
        for event in filled:
            event.synchronize()
        memory = [_bytes_of(tensor.detach().cpu()) for tensor in tensors]
    except Exception as error:
        send_one(asked, Answer(in_words(error)))
        return
    send_one(asked, Answer(None))
    for one in memory:
        asked.sendall(one.numpy())


def fetch(where: Located, source: Source, specs: Sequence[TensorSpec], why: str) -> list[Any]:
    """Get all tensors of a value in memory of the host. ``why``: they cannot be got otherwise.

    Raises:
        ActorDiedError: the keeper has died.
        TransportError: it could not copy them.
        WaitTimeoutError: the ``get`` that needs them has no longer.
    """
    _tell_once(where.keeper, why)

    def look() -> float:
        source.check()
        left = _core.seconds_to_fetch()
        if left == 0:
            raise WaitTimeoutError(
                f"the timeout of get() is over: tensors of a device that {where.keeper} keeps have not come "
                "by way of the host's memory"
            )
        return _LOOK if left is None else min(left, _LOOK)

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            ask(sock, source, Ask(where.number, b""), look)
            while not readable([sock], look()):
                pass
            sock.settimeout(None)
            answer = receive_one(sock, Answer)
            if answer is None:
                raise ConnectionResetError("it has hung up")
            if answer.error is None:
                return [_receive(sock, spec, look) for spec in specs]
        except WaitTimeoutError:  # which is an OSError
            raise
        except OSError as error:
            source.check(error)
            raise _error(where, str(error)) from error
    raise _error(where, answer.error)


def _receive(sock: socket.socket, spec: TensorSpec, look: Any) -> torch.Tensor:
    import torch

    dtype = getattr(torch, spec.dtype)
    made = torch.empty(math.prod(spec.shape) * dtype.itemsize, dtype=torch.uint8)
    rest = memoryview(made.numpy())
    while rest:
        if not readable([sock], look()):
            continue
        came = sock.recv_into(rest)
        if not came:
            raise ConnectionResetError("it has hung up")
        rest = rest[came:]
    return made.view(dtype).view(spec.shape)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.contiguous().view(-1).view(torch.uint8)


def _error(where: Located, why: str) -> TransportError:
    me = context.current().own_actor
    return TransportError(
        f"{where.keeper} could not send tensors of a device to {'the driver' if me is None else me.name} by "
        f"way of the host's memory: {why}"
    )


@functools.cache
def _tell_once(keeper: str, why: str) -> None:
    me = context.current().own_actor
    _log.warning(
        "tensors of a device that %s keeps come to %s by way of the host's memory, since it cannot open that "
        "device's: %s",
        keeper,
        "the driver" if me is None else me.name,
        why,
    )
