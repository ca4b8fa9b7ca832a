"""Groups of two ranks of NCCL, by the functions of its library.

Only the functions that a pair needs are here; they have been the same since NCCL 2.14. They bypass
``torch.distributed``, whose watchdog ends the process when a communicator fails, and whose groups want a
store.
"""

from __future__ import annotations

import ctypes
import os
import threading
from abc import ABC, abstractmethod
from typing import Any

from conveyor.device import Device, Stream
from conveyor.device.base import wait_until
from conveyor.transport.network_interfaces import LOOPBACK, interface_of

_LIBRARY = "libnccl.so.2"
_OLDEST = 21400
#: From this version on two ranks may share a GPU, if this variable is set.
_SHARING, _SHARE = 23000, "NCCL_MULTI_RANK_GPU_ENABLE"
#: Names the network interfaces that may be used; "=" says that the name is the whole one.
_INTERFACE = "NCCL_SOCKET_IFNAME"
_SUCCESS, _IN_PROGRESS = 0, 7
_UINT8 = 1
_MAGIC = 0xCAFEBEEF


class Group(ABC):
    """A group of two ranks. All methods but :meth:`abort` are called on one thread."""

    @staticmethod
    @abstractmethod
    def missing() -> str | None:
        """Say why this process can have no group, without importing anything slow. ``None``: it can."""

    @staticmethod
    def go_by(address: str) -> None:
        """Make this process's groups use the network interface with that address from now on, as far as the
        interface can be chosen. An empty address chooses none."""
        del address

    @staticmethod
    @abstractmethod
    def new_identity() -> bytes:
        """Make the identity by which both ranks know a group. It is called in the process of rank 0."""

    @abstractmethod
    def __init__(self, device: Device, index: int, identity: bytes, rank: int) -> None:
        """Begin, without waiting for the other rank."""

    @abstractmethod
    def connect(self) -> None:
        """Wait for the other rank. Raises an error when the group is aborted."""

    @abstractmethod
    def send(self, memory: Any, stream: Stream) -> None:
        """Enqueue that a tensor of bytes is sent to the other rank."""

    @abstractmethod
    def receive(self, memory: Any, stream: Stream) -> None:
        """Enqueue that a tensor of bytes is received from the other rank."""

    @abstractmethod
    def abort(self) -> None:
        """End all enqueued work, whatever the other rank does. Any thread may call this, any number of
        times."""


class _Id(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * 128),)


class _Config(ctypes.Structure):
    """``ncclConfig_t`` as of 2.14: later ones take it, and have their defaults for the rest."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )


class NcclGroup(Group):
    """Group of two ranks of NCCL. Its calls do not wait (``blocking`` is 0), so :meth:`abort` can end
    each."""

    def __init__(self, device: Device, index: int, identity: bytes, rank: int) -> None:
        self._device = device
        self._index = index
        self._identity = identity
        self._rank = rank
        self._communicator = ctypes.c_void_p()
        self._aborted = False
        #: Held during calls of the communicator: none may be under way when it is aborted.
        self._calls = threading.RLock()

    @staticmethod
    def missing() -> str | None:
        """Return why NCCL cannot be used: the library is missing or too old. ``None``: it can."""
        try:
            version = version_of(load())
        except OSError as error:
            return f"NCCL is not to be found: {error}"
        if version < _OLDEST:
            return f"NCCL {_shown(version)} is older than {_shown(_OLDEST)}"
        return None

    @staticmethod
    def go_by(address: str) -> None:
        """Set NCCL's variable for the network interface, unless the program has set it. NCCL reads it once in
        a process, at its first group. On that interface NCCL listens for each group while the group is made;
        on other interfaces it listens for data only."""
        name = interface_of(address) if address else None
        if name is not None and name != LOOPBACK:
            os.environ.setdefault(_INTERFACE, f"={name}")

    @staticmethod
    def new_identity() -> bytes:
        """Make NCCL's unique id, as bytes."""
        made = _Id()
        library = load()
        _check(library, library.ncclGetUniqueId(ctypes.byref(made)), "ncclGetUniqueId")
        return bytes(made)

    def connect(self) -> None:
        """Make the communicator, and wait for the other rank."""
        library, identity = load(), _Id.from_buffer_copy(self._identity)
        config = _Config(ctypes.sizeof(_Config), _MAGIC, _OLDEST, 0)
        with self._device.using(self._device.current_stream(self._index)):
            self._call(
                "ncclCommInitRankConfig",
                lambda: library.ncclCommInitRankConfig(
                    ctypes.byref(self._communicator), 2, identity, self._rank, ctypes.byref(config)
                ),
            )

    def send(self, memory: Any, stream: Stream) -> None:
        """Enqueue that a tensor of bytes is sent to the other rank."""
        self._move("ncclSend", memory, stream)

    def receive(self, memory: Any, stream: Stream) -> None:
        """Enqueue that a tensor of bytes is received from the other rank."""
        self._move("ncclRecv", memory, stream)

    def abort(self) -> None:
        """Abort the communicator, once. Later calls to it raise an error."""
        with self._calls:
            already, self._aborted = self._aborted, True
            if not already and self._communicator.value:
                load().ncclCommAbort(self._communicator)

    def _move(self, name: str, memory: Any, stream: Stream) -> None:
        where = ctypes.c_void_p(memory.data_ptr())
        native = ctypes.c_void_p(stream.stream.cuda_stream)  # type: ignore[attr-defined]
        with self._device.using(stream):
            self._call(
                name,
                lambda: getattr(load(), name)(
                    where,
                    ctypes.c_size_t(memory.numel()),
                    _UINT8,
                    1 - self._rank,
                    self._communicator,
                    native,
                ),
            )

    def _call(self, name: str, call: Any) -> None:
        """Call a function of NCCL, and wait until the CPU's part of its work is done."""
        library = load()
        with self._calls:
            self._check_aborted()
            code = call()

        def is_done() -> bool:
            nonlocal code
            if code == _IN_PROGRESS:
                state = ctypes.c_int()
                with self._calls:
                    self._check_aborted()
                    requested = library.ncclCommGetAsyncError(
                        self._communicator, ctypes.byref(state)
                    )
                code = requested or state.value
            return bool(code != _IN_PROGRESS)

        wait_until(is_done)  # NCCL rings for nobody, either
        if code == _SUCCESS:
            return
        message = explained(library, code, name)
        if name == "ncclCommInitRankConfig" and _SHARE not in os.environ:
            message += (
                f" (two actors on one GPU need NCCL {_shown(_SHARING)}, and {_SHARE}=1; this is "
                f"{_shown(version_of(library))})"
            )
        raise RuntimeError(message)

    def _check_aborted(self) -> None:
        if self._aborted:
            raise ConnectionAbortedError("the group is not wanted any more")


def load() -> Any:
    """Return NCCL's library: torch's, if it is loaded.

    Raises:
        OSError: there is no such library.
    """
    return ctypes.CDLL(_LIBRARY)


def version_of(library: Any) -> int:
    """Return the version of NCCL as a number: 22304 is 2.23.4."""
    version = ctypes.c_int()
    _check(library, library.ncclGetVersion(ctypes.byref(version)), "ncclGetVersion")
    return version.value


def can_share() -> str | None:
    """Say why two ranks cannot be on one GPU. ``None``: they can."""
    why_not = NcclGroup.missing()
    if why_not is None and version_of(load()) < _SHARING:
        return f"NCCL {_shown(version_of(load()))} is older than {_shown(_SHARING)}"
    return why_not


def explained(library: Any, code: int, name: str) -> str:
    """Return the message for a call that has failed with ``code``."""
    words = library.ncclGetErrorString
    words.restype = ctypes.c_char_p
    return f"{name} has failed: {words(code).decode()}"


def _check(library: Any, code: int, name: str) -> None:
    if code != _SUCCESS:
        raise RuntimeError(explained(library, code, name))


def _shown(version: int) -> str:
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
