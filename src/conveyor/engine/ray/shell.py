"""The Ray actor whose process becomes one of ours, and how it does.

It is a plain synchronous actor of Ray's: any option that has Ray run several methods at a time would move
them off the process's main thread, where an actor's methods belong. One call to it lasts as long as our
actor lives.
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
from conveyor.engine.program_end import flush, leave
from conveyor.engine.ray.connected import Connected
from conveyor.engine.ray.greeting import (
    MESSAGE_BYTES,
    Birth,
    Elsewhere,
    Farewell,
    Here,
    Locality,
    Told,
    Welcome,
    read,
    read_file,
    version,
    write,
)
from conveyor.engine.surroundings import HUGE_TENSORS, import_from, main_module
from conveyor.exceptions import ActorStartError
from conveyor.local_sockets import UnprovenPeerError, prove
from conveyor.runtime import threads
from conveyor.runtime.actor.forked import exit_code, flush_files

#: The kernel's limit for one message.
_MAX_FDS = 253
#: What Ray has started the process with, which a frame of Ray's may still refer to.
_rays_main: Any = None


class Shell:
    """Ray's side of an actor: started where Ray places it, under the name of the user's class."""

    def run(self, birth: Birth) -> Elsewhere | None:
        """Be the actor of that birth, which ends the process. If it is on another host, say so instead."""
        import ray

        connection = meet_at(birth)
        if connection is None:
            return where()
        # Collections have the user's objects to look through, and not those of Ray: the end has two of them.
        gc.freeze()
        become_actor(birth, connection)
        # Ray has the interpreter end, which calls this one first of all that is registered.
        atexit.register(_leave)
        ray.actor.exit_actor()
        return None


def _leave() -> None:
    """Do what else is registered, Ray's own end among it, and end the process. To take down the interpreter
    with all that Ray has loaded takes a quarter of a second of a core, for each actor of a session."""
    atexit.unregister(_leave)
    # What was open before the freeze is found again.
    leave(0, gc.unfreeze, flush)


def become_actor(birth: Birth, connection: socket.socket) -> None:
    """Run the actor on this thread, the process's main one, until it ends. Who waits at the other end of the
    connection is told how.

    Raises:
        ActorStartError: it takes this process for nobody's.
    """
    os.environ.update(birth.environ)
    os.environ.setdefault(HUGE_TENSORS, "1")
    with connection:
        fds = welcomed(connection)
        code = 1
        try:
            told_fd, driver, *handed = fds
            threads.start(_end_with, "with-driver", driver)
            told = read_file(told_fd)
            os.close(told_fd)
            _set_up(told)
            code = _run(told, handed)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            flush_files()
            # A driver that is gone needs no farewell.
            with suppress(OSError):
                connection.send(write(Farewell(code)))


def meet_at(birth: Birth) -> socket.socket | None:
    """Connect to who waits for this process, with both ends proved; ``None`` if that is on another node.

    Raises:
        ActorStartError: they are on one node, and cannot share memory all the same; or whoever has the
            socket's name does not prove itself.
    """
    import ray

    if birth.node and birth.node != ray.get_runtime_context().get_node_id():
        return None
    own, waits = Locality.own(), birth.waits
    if not own.is_local(waits):
        if birth.stay:
            raise _unreachable("it is in another network or PID namespace")
        return None
    if own.user != waits.user:
        raise ActorStartError(
            f"the processes of the Ray cluster run as user {own.user_name}, and "
            f"{'the agent of their node' if birth.stay else 'the driver'} as user {waits.user_name}, on one "
            f"machine ({socket.gethostname()}): they could neither share memory nor end each other. Start "
            "both as the same user"
        )
    connection = descriptors.own_socket(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    try:
        connection.connect("\0" + birth.address)
        prove(connection, birth.key, birth.number)
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
        if birth.stay:
            raise _unreachable(str(error.strerror)) from error
        return None  # copies of one virtual machine may say the same of where they run
    except BaseException:
        connection.close()
        raise
    return connection


def _unreachable(why: str) -> ActorStartError:
    return ActorStartError(
        f"who waits for it on its own node, {socket.gethostname()}, cannot be reached ({why}): have Ray "
        "start it in the network namespace of the node"
    )


def where() -> Elsewhere:
    """Where this process is."""
    import ray

    return Elsewhere(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address())


def welcomed(connection: socket.socket) -> list[int]:
    """The descriptors that the driver gives to this process."""
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
    """Wait for the driver's end, which is this process's as well: Ray learns of it later."""
    poll = select.poll()
    poll.register(driver, select.POLLIN)
    poll.poll()
    os.kill(os.getpid(), signal.SIGKILL)


def _set_up(told: Told) -> None:
    # Ray's handler is for a worker between two tasks. This one's main thread is in ours, natively, and the
    # kernel's default does at once what it would do late.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(OSError):  # the driver's directory may be nobody else's to enter
        os.chdir(told.around.cwd)
    # Ray's own first: what it has put there is what the runtime environment has brought.
    path = [*sys.path, *(entry for entry in told.around.sys_path if entry not in sys.path)]
    import_from(path)
    sys.argv[:] = told.around.argv
    global _rays_main
    _rays_main = sys.modules["__main__"]
    main_module(told.around.main_file, told.around.main_module)


def _run(told: Told, fds: list[int]) -> int:
    import ray

    from conveyor.runtime import context
    from conveyor.runtime.actor import worker

    context.place_on(Connected(ray))
    pid, code = os.getpid(), 0
    try:
        worker.main(told.payload, fds)
    except SystemExit as error:
        code = exit_code(error)
    if os.getpid() != pid:  # a child that user code has forked, and that leaves by sys.exit
        flush_files()
        os._exit(code)
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.main_thread():
            thread.join()  # as the interpreter's end does
    return code
