"""Network namespaces, each of which stands for a host."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Iterator

_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def refusal() -> str:
    """Why there can be no namespaces here; "" where there can."""
    if os.geteuid() != 0:
        return (
            "making network namespaces takes root, or a user namespace: run `make test-netns`, or pytest "
            "under `unshare -rn`"
        )
    for tool in ("unshare", "nsenter", "ip", "ss", "setpriv"):
        if not any(
            os.access(os.path.join(folder, tool), os.X_OK)
            for folder in os.environ.get("PATH", "").split(":")
        ):
            return f"there is no `{tool}`: install iproute2 and util-linux"
    made = subprocess.run(
        ["unshare", "-n", "ip", "link", "set", "lo", "up"],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        return f"this machine allows no network namespaces: {made.stderr.strip()}"
    return ""


class Namespace:
    """One of them, as long as a process of its own stays in it."""

    def __init__(self) -> None:
        # It ends at the end of its input, so with whoever has made the namespace.
        self._holder = subprocess.Popen(
            ["unshare", "-n", "sh", "-c", "echo; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._holder.stdout is not None
        self._holder.stdout.read(1)
        self.path = f"/proc/{self._holder.pid}/ns/net"
        self.identity = os.readlink(self.path)
        self.run("ip", "link", "set", "lo", "up")

    def command(self, *words: str) -> list[str]:
        """What runs a command in it, and ends it with the process that has started it."""
        return ["setpriv", "--pdeathsig", "TERM", "nsenter", f"--net={self.path}", *words]

    def run(self, *words: str) -> str:
        """Run a command there to its end; what it has printed."""
        done = subprocess.run(self.command(*words), capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"{' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """This thread is there meanwhile, and so are the processes and threads that it starts."""
        with entered(self.path):
            yield

    def pids(self) -> list[int]:
        """Of the processes that are there, but the holder and this one."""
        return [
            pid
            for pid in map(int, filter(str.isdigit, os.listdir("/proc")))
            if pid not in (os.getpid(), self._holder.pid) and self._has(pid)
        ]

    def _has(self, pid: int) -> bool:
        try:
            return os.readlink(f"/proc/{pid}/ns/net") == self.identity
        except OSError:  # it has ended, or is somebody else's
            return False

    def kill_all(self) -> None:
        """Kill what is there, as the loss of a host would; until nothing is there any more."""
        while pids := self.pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    pidfd = os.pidfd_open(pid)
                    if self._has(pid):  # else the number is another's by now
                        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                    os.close(pidfd)

    def close(self) -> None:
        self.kill_all()
        self._holder.communicate()


@contextlib.contextmanager
def entered(path: str) -> Iterator[None]:
    """This thread is in the namespace at ``path`` meanwhile."""
    with open("/proc/thread-self/ns/net", "rb") as outside, open(path, "rb") as inside:
        _enter(inside.fileno())
        try:
            yield
        finally:
            _enter(outside.fileno())


def _enter(fd: int) -> None:
    if _libc.setns(fd, _CLONE_NEWNET) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"setns: {os.strerror(error)}")
