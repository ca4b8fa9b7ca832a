"""Limits of the system that a process meets, in words: which it is, how high it is, and what to do."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

from conveyor.exceptions import SystemLimitError, TaskError

#: Said of a process whose code has closed the library's descriptors.
CLOSED = "has closed descriptors of conveyor's (os.closerange, or a number not its own)"

#: The fork server's name among the system's processes.
FORK_SERVER = "cv-fork-server"

#: Descriptors that a session asks for at most: programs that close all numbers up to the limit, one by
#: one, shall not take long over it.
_MOST_DESCRIPTORS = 1 << 16

#: Errors by which the kernel refuses a socket for the moment only; nothing is lost by them.
PASSING = frozenset({errno.ENOMEM, errno.ENOBUFS, errno.ETOOMANYREFS})
#: Errors that mean that there is no memory for a file that is in memory.
NO_MEMORY = frozenset({errno.ENOMEM, errno.ENOSPC})

# Name of this process in texts that other processes may show.
_name = "the driver"


def name_process(name: str) -> None:
    """Name this process in errors; the default is the driver."""
    global _name
    _name = name


def raise_descriptor_limit() -> None:
    """Raise the soft limit of descriptors to the hard one, as far as anybody needs it."""
    soft, wanted = descriptor_limits()
    if soft < wanted:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def descriptor_limits() -> tuple[int, int]:
    """Return how many descriptors this process may have, and how many a session lets it have."""
    soft, hard = (
        _MOST_DESCRIPTORS if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    return soft, max(soft, min(hard, _MOST_DESCRIPTORS))


def hint(error: OSError) -> str:
    """Explain ``error`` if a limit of this process or of the system is behind it, or code of this process;
    else return an empty string."""
    who = f"{_name} (pid {os.getpid()})"
    if error.errno == errno.EMFILE:
        return (
            f"{who} may have {_soft(resource.RLIMIT_NOFILE)} descriptors, and has them (an actor takes "
            f"the driver 7, and an actor 2 for each process it knows): raise the limit (ulimit -n, "
            f"LimitNOFILE= of systemd), have fewer actors, or have it keep fewer files open"
        )
    if error.errno == errno.EBADF:
        return f"code of {who} {CLOSED}"
    if error.errno == errno.ENFILE:
        return "the system has no descriptors left (fs.file-max)"
    if error.errno == errno.EFBIG:
        return (
            f"files of {who} may have {_soft(resource.RLIMIT_FSIZE)} bytes (ulimit -f), which "
            f"holds for shared memory too: raise the limit, or ask for less with init(arena_bytes=)"
        )
    if error.errno == errno.ENOMEM:
        return (
            f"{who} may have {_soft(resource.RLIMIT_AS)} bytes of addresses (ulimit -v), or the "
            f"system has no memory left: raise the limit"
        )
    if error.errno == errno.ENOSPC:
        return f"the system has no memory left for files of {who} that are in memory"
    if error.errno == errno.EAGAIN:
        return (
            f"this user may have {_soft(resource.RLIMIT_NPROC)} processes and threads (ulimit -u), or the "
            f"container fewer (pids.max of its cgroup): raise the limit"
        )
    return ""


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn an error of the system inside into a ``SystemLimitError`` if a limit is the cause. ``what``: the
    work in hand, in words that follow "cannot". Errors raised elsewhere keep saying whose limit it is."""
    try:
        yield
    except (SystemLimitError, TaskError):
        raise
    except OSError as error:
        said = hint(error)
        if not said:
            raise
        raise SystemLimitError(error.errno, f"cannot {what}: {error.strerror}; {said}") from error


def _soft(limit: int) -> str:
    soft, _ = resource.getrlimit(limit)
    return "any number of" if soft == resource.RLIM_INFINITY else str(soft)


def cores() -> int:
    """Return how many processes can run at once."""
    return len(os.sched_getaffinity(0))
