"""A process that has no descriptor left."""

import contextlib
import os
import resource
import select
import socket


@contextlib.contextmanager
def none_at_all():
    """The process gets none.

    Only the numbers of the standard streams are below the limit, and nobody closes those: one that another
    thread closes meanwhile, of an earlier test say, cannot be had either. The limit is not zero, since
    ``poll`` takes no more descriptors than it says.
    """
    with _limit(3):
        yield


@contextlib.contextmanager
def none_beyond():
    """The process gets none beyond those that it has; one that is closed can be had again."""
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    fillers = []
    with _limit(highest + 1):
        try:
            with contextlib.suppress(OSError):
                while True:
                    fillers.append(os.open(os.devnull, os.O_RDONLY))
            yield
        finally:
            for fd in fillers:
                os.close(fd)


@contextlib.contextmanager
def _limit(soft):
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))


def is_turned_away(address, family=socket.AF_UNIX, kind=socket.SOCK_STREAM):
    """Whether a connection is closed at once when there are none beyond those of the process.

    Several come: another thread, of an earlier test say, may close one of its own meanwhile, and that lets
    one of them in.
    """
    with contextlib.ExitStack() as stack:
        several = [stack.enter_context(socket.socket(family, kind)) for _ in range(8)]
        with none_beyond():
            for one in several:
                one.connect(address)
            ready, _, _ = select.select(several, [], [], 60)
            with contextlib.suppress(ConnectionResetError):
                return bool(ready) and ready[0].recv(1) == b""
            return True
