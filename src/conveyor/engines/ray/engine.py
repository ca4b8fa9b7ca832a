"""The start of a session whose actors are Ray's to place."""

from __future__ import annotations

import functools
import os
import signal
import socket
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from conveyor import _core, system_limits
from conveyor.cluster.addresses import listening
from conveyor.cluster.tls import credentials
from conveyor.driver.driver import Driver
from conveyor.engines.options import session_options
from conveyor.engines.program_end import ProgramEnd
from conveyor.engines.ray.attached import RayProcessEngineWithAttached
from conveyor.exceptions import RuntimeStateError
from conveyor.later import import_later
from conveyor.runtime import context
from conveyor.runtime.context import Cluster

#: Timeout of a cluster's head to answer, in seconds.
_CONNECT_SECONDS = 10.0
#: First bytes of an HTTP/2 client: its preface, and settings that change nothing. A server sends its own
#: settings first. A frame's header has its type behind the length.
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_FRAME_HEADER, _SETTINGS_FRAME = 9, 4
#: Prefix of the environment variables that actors read, and that Ray does not pass on.
_SETTINGS = "CONVEYOR_"
#: Seconds without a message after which a node is lost. Over TLS a thread of Python carries the messages,
#: which waits for native code of the program that keeps the interpreter to itself.
_NODE_TIMEOUT, _TLS_TIMEOUT = 1.0, 10.0


def start(
    address: str | None = None,
    cluster: Mapping[str, Any] | None = None,
    shared_memory: str = "machine",
    node_timeout: float | None = None,
    tls: bool | Mapping[str, Any] | None = None,
    listen_address: str | None = None,
    listen_ports: tuple[int, int] | None = None,
    **given: Any,
) -> Driver:
    """Start a session on Ray. ``given``: the options of ``engines.options``.

    address: of the Ray cluster; ``None`` connects to a cluster that Ray finds by its own rules, or starts one
    on this machine. If the program has called ``ray.init`` itself, its connection is used, and not closed.
    cluster: further arguments of ``ray.init``.
    shared_memory: the processes that share memory: all of a ``"machine"``, whatever node they are of, or
    only those of one ``"node"``, so that two nodes of one machine are connected as two machines are.
    node_timeout: seconds after which a node that sends nothing is taken for lost.
    tls: whether connections between nodes are over TLS. ``True``: with a certificate that is made for this
    session. A mapping: with files of each node, by the names ``certificate``, ``key`` and ``ca``.
    listen_address: an interface, a network (``"10.0.0.0/8"``) or an address. Each node listens at its own of
    these. Default: the address by which Ray knows the node.
    listen_ports: the first and the last port at which nodes listen, one each. Default: any that is free.
    """
    if address is not None and not isinstance(address, str):
        raise TypeError(f"address must be a str, not {type(address).__name__}")
    if node_timeout is None:
        node_timeout = _TLS_TIMEOUT if tls else _NODE_TIMEOUT
    check_sharing(shared_memory, node_timeout)
    shows = credentials(tls)
    listens = listening(listen_address, listen_ports)
    options = session_options("ray", **given)
    if options.raise_descriptor_limit:
        system_limits.raise_descriptor_limit()
    ray, disconnect = _connect(address, {"log_to_driver": options.log_to_driver, **(cluster or {})})
    environ = {key: value for key, value in os.environ.items() if key.startswith(_SETTINGS)}
    try:
        listens.own_address(ray.util.get_node_ip_address())
        own_node = ray.get_runtime_context().get_node_id() if shared_memory == "node" else ""
        engine = RayProcessEngineWithAttached(
            ray,
            {**environ, **options.env_vars},
            disconnect,
            own_node,
            float(node_timeout),
            shows,
            listens,
        )
        driver = Driver(engine, options.arena, options.grace)
        context.place_on(Cluster(ray))
    except BaseException:
        disconnect()
        raise
    program_end = ProgramEnd(driver, options.grace, options.handle_sigterm, first=True)
    driver.at_shutdown = program_end.cancel
    if ray.get_runtime_context().get_actor_id() is not None:
        exit_actor = ray.actor.exit_actor

        def cancel() -> None:
            ray.actor.exit_actor = exit_actor
            program_end.cancel()

        driver.at_shutdown = cancel
        ray.actor.exit_actor = _ending_first(driver.shutdown, exit_actor)
    if options.handle_sigterm:
        _leave_sigterm_to_python()
    return driver


def _ending_first(end: Callable[[], object], exit_actor: Callable[[], Any]) -> Callable[[], Any]:
    """Make ``ray.actor.exit_actor`` of an actor that has begun a session: ``end()`` ends the session before.
    Ray waits, without end, for all calls that a leaving actor has made, and our processes are such calls."""

    @functools.wraps(exit_actor)
    def end_and_exit() -> Any:
        try:
            end()
        except Exception:  # the actor leaves all the same, and Ray waits for the calls left
            traceback.print_exc()
        return exit_actor()

    return end_and_exit


def _leave_sigterm_to_python() -> None:
    """Have SIGTERM go only to its handler in Python, which is Ray's. Ray has also set a native handler, which
    aborts the process three seconds later; that would cut the actors' grace period short."""
    handler = signal.getsignal(signal.SIGTERM)
    if callable(handler) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def check_sharing(shared_memory: object, node_timeout: object) -> None:
    """Raise ``ValueError`` if one of these options has an invalid value."""
    if shared_memory not in ("machine", "node"):
        raise ValueError(
            f'shared_memory is "machine" or "node", not {shared_memory!r}: among whose processes there is any'
        )
    if (
        isinstance(node_timeout, bool)
        or not isinstance(node_timeout, (int, float))
        or not 0.1 <= node_timeout <= 3600
    ):
        raise ValueError(
            f"node_timeout must be a number of seconds from 0.1 to 3600, not {node_timeout!r}"
        )


def _connect(address: str | None, cluster: dict[str, Any]) -> tuple[Any, Callable[[], object]]:
    """Connect to Ray. Return its module, and a function that ends the connection if it is ours."""
    try:
        ray = import_later("ray")
    except ImportError as error:
        raise RuntimeStateError(
            f'engine="ray" needs Ray, which cannot be imported ({error}): pip install "conveyor[ray]"'
        ) from error
    if context.inherited_ray():
        raise RuntimeStateError(
            'engine="ray" cannot be used in this process: it was forked from one that was connected to Ray, '
            "and Ray does not work in forked children. Start it by another method "
            '(multiprocessing.get_context("spawn")), fork before Ray is connected, or use engine="local"'
        )
    context.note_ray()
    if ray.is_initialized():
        return ray, lambda: None
    _check_reachable(address or os.environ.get("RAY_ADDRESS", ""))
    ray.init(address=address, **cluster)
    return ray, ray.shutdown


def _check_reachable(address: str) -> None:
    """Raise ``ConnectionError`` if ``address`` is a host and a port at which no Ray cluster answers. Ray
    itself would try for minutes, and then end the process. If a server there says nothing, Ray would try
    for ever."""
    host, _, port = address.rpartition(":")
    if not host or "//" in host or not port.isdecimal():
        return
    if not 1 <= int(port) <= 65535:
        raise ValueError(f"there is no port {port}, in the address {address!r} of a Ray cluster")
    end = _core.monotonic() + _CONNECT_SECONDS
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS) as requested:
            if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
                _check_answers(requested, end)
    except OSError as error:
        raise ConnectionError(
            f"there is no Ray cluster at {address}: {error}. Start one with `ray start --head`, or leave the "
            f"address out to have one started on this machine"
        ) from error


def _check_answers(requested: socket.socket, end: float) -> None:
    """Raise ``OSError`` unless the other side speaks HTTP/2 by the deadline ``end``, as Ray's head does. Not
    for heads that use Ray's TLS."""
    requested.sendall(_HTTP2_PREFACE)
    said = b""
    while len(said) < _FRAME_HEADER:
        requested.settimeout(max(end - _core.monotonic(), 0.001))
        try:
            more = requested.recv(_FRAME_HEADER - len(said))
        except TimeoutError:
            raise TimeoutError(
                f"what listens there has said nothing for {_CONNECT_SECONDS:g} s"
            ) from None
        if not more:
            raise ConnectionError("what listens there has closed the connection")
        said += more
    if said[3] != _SETTINGS_FRAME:
        raise ConnectionError("what listens there speaks another protocol than Ray")
