"""The Ray actor whose process becomes one of ours.

The Ray actor is a plain synchronous one. Any option that has Ray run several methods at a time would move
them off the process's main thread, where an actor's methods belong. One call of the Ray actor lasts as long
as our actor lives.
"""

from __future__ import annotations

import atexit
import gc
import os
import select
import signal
import socket
import sys
import threading
from array import array
from contextlib import suppress
from typing import Any

from conveyor import descriptors
from conveyor.engines.program_end import flush, leave
from conveyor.engines.ray.bootstrap import (
    MESSAGE_BYTES,
    Bootstrap,
    BootstrapFile,
    Farewell,
    Here,
    Locality,
    NodeOfProcess,
    Welcome,
    read,
    read_file,
    version,
    write,
)
from conveyor.engines.surroundings import HUGE_TENSORS, import_from, main_module
from conveyor.exceptions import ActorStartError
from conveyor.local_sockets import UnprovenPeerError, prove
from conveyor.runtime import context, threads
from conveyor.runtime.context import Cluster
from conveyor.worker.forked import exit_code, flush_files

#: The kernel's limit for one message.
_MAX_FDS = 253
#: The ``__main__`` that Ray has started the process with. A frame of Ray's may still refer to it.
_rays_main: Any = None


class RayActor:
    """Ray's side of an actor: started where Ray places it, under the name of the user's class."""

    def run(self, bootstrap: Bootstrap) -> NodeOfProcess | None:
        """Be the actor of that bootstrap until it ends, and then end the process. If the process is not on
        the node where it is expected, return its node at once instead."""
        import ray

        connection = meet_at(bootstrap)
        if connection is None:
            return where()
        # Spare garbage collections the objects of Ray. There are two at the process's end alone.
        gc.freeze()
        become_actor(bootstrap, connection)
        # Ray ends the interpreter, which calls `_leave` first of all functions that are registered.
        atexit.register(_leave)
        ray.actor.exit_actor()
        return None


def _leave() -> None:
    """Run the other functions of ``atexit``, Ray's own among them, and end the process without taking the
    interpreter down. With all that Ray has loaded that would take a quarter of a second of a core
    per actor."""
    atexit.unregister(_leave)
    # Unfreeze: files that were open before the freeze are to be found again.
    leave(0, gc.unfreeze, flush)


def become_actor(bootstrap: Bootstrap, connection: socket.socket) -> None:
    """Run the actor on this thread, the process's main one, until it ends. Then send a farewell with its exit
    code over the connection.

    Raises:
        ActorStartError: the other end refuses this process.
    """
    os.environ.update(bootstrap.environ)
    os.environ.setdefault(HUGE_TENSORS, "1")
    with connection:
        fds = welcomed(connection)
        code = 1
        try:
            boot_fd, driver, *handed = fds
            threads.start(_end_with, "with-driver", driver)
            boot_file = read_file(boot_fd)
            os.close(boot_fd)
            _set_up(boot_file)
            code = _run(boot_file, handed)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            flush_files()
            # A driver that is gone needs no farewell.
            with suppress(OSError):
                connection.send(write(Farewell(code)))


def meet_at(bootstrap: Bootstrap) -> socket.socket | None:
    """Connect to the driver or node agent that waits for this process, with both ends proved. Return ``None``
    if it is on another node.

    Raises:
        ActorStartError: the two are on one node, and cannot share memory all the same; or the process at the
            socket's name does not prove itself.
    """
    import ray

    if bootstrap.node and bootstrap.node != ray.get_runtime_context().get_node_id():
        return None
    own, waits = Locality.own(), bootstrap.waits
    if not own.is_local(waits):
        if bootstrap.stay:
            raise _unreachable("it is in another network or PID namespace")
        return None
    if own.user != waits.user:
        raise ActorStartError(
            f"the processes of the Ray cluster run as user {own.user_name}, and "
            f"{'the agent of their node' if bootstrap.stay else 'the driver'} as user "
            f"{waits.user_name}, on one "
            f"machine ({socket.gethostname()}): they could neither share memory nor end each other. Start "
            "both as the same user"
        )
    connection = descriptors.own_socket(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    try:
        connection.connect("\0" + bootstrap.address)
        prove(connection, bootstrap.key, bootstrap.number)
        stderr = ""
        with suppress(OSError):
            stderr = os.readlink("/proc/self/fd/2")
        connection.send(write(Here(version(), stderr)))
    except UnprovenPeerError as error:
        connection.close()
        raise ActorStartError(
            f"who waits for it does not take the process that Ray has started: {error}"
        ) from error
    except OSError as error:
        connection.close()
        if bootstrap.stay:
            raise _unreachable(str(error.strerror)) from error
        return None  # copies of one virtual machine may have equal localities
    except BaseException:
        connection.close()
        raise
    return connection


def _unreachable(why: str) -> ActorStartError:
    return ActorStartError(
        f"who waits for it on its own node, {socket.gethostname()}, cannot be reached ({why}): have Ray "
        "start it in the network namespace of the node"
    )


def where() -> NodeOfProcess:
    """Return the node of this process."""
    import ray

    return NodeOfProcess(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address())


def welcomed(connection: socket.socket) -> list[int]:
    """Receive the descriptors for this process. ``ActorStartError`` if the process is refused."""
    space = socket.CMSG_SPACE(_MAX_FDS * array("i").itemsize)
    data, ancillary, flags, _ = connection.recvmsg(MESSAGE_BYTES, space, socket.MSG_CMSG_CLOEXEC)
    fds = array("i")
    for level, kind, rights in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(rights[: len(rights) - len(rights) % fds.itemsize])
    welcome = read(data, Welcome)
    if welcome is None or welcome.refused or flags & socket.MSG_CTRUNC:
        for fd in fds:
            os.close(fd)
        why = "it has hung up" if welcome is None else welcome.refused
        raise ActorStartError(
            f"the driver refuses the process that Ray has started: {why or 'descriptors were lost'}"
        )
    return [descriptors.own(fd) for fd in fds]


def _end_with(driver: int) -> None:
    """Wait for the driver's end, and then kill this process: Ray learns of that end later."""
    poll = select.poll()
    poll.register(driver, select.POLLIN)
    poll.poll()
    os.kill(os.getpid(), signal.SIGKILL)


def _set_up(boot_file: BootstrapFile) -> None:
    # Ray's handler is for a worker between two tasks. Here the main thread is in our native code, so Ray's
    # handler would run late; the kernel's default ends the process at once.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(OSError):  # only the driver may be allowed to enter its directory
        os.chdir(boot_file.around.cwd)
    # Ray's entries first: they come from the runtime environment.
    path = [*sys.path, *(entry for entry in boot_file.around.sys_path if entry not in sys.path)]
    import_from(path)
    sys.argv[:] = boot_file.around.argv
    global _rays_main
    _rays_main = sys.modules["__main__"]
    main_module(boot_file.around.main_file, boot_file.around.main_module)


def _run(boot_file: BootstrapFile, fds: list[int]) -> int:
    import ray

    from conveyor.worker import worker

    context.place_on(Cluster(ray))
    pid, code = os.getpid(), 0
    try:
        worker.main(boot_file.payload, fds)
    except SystemExit as error:
        code = exit_code(error)
    if os.getpid() != pid:  # a child that user code has forked, and that leaves by sys.exit
        flush_files()
        os._exit(code)
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.main_thread():
            thread.join()  # as the interpreter's end does
    return code
