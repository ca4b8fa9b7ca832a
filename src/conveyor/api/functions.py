"""The verbs on references and actors, and arrays and tensors in memory that travels as it is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

from conveyor import _core
from conveyor.api.actors import ActorHandle, AnyActor, check_usable
from conveyor.api.methods import make_table
from conveyor.api.options import check_get_options, check_snapshot, check_transport
from conveyor.checks import check_count, check_flag, check_shape
from conveyor.exceptions import ArenaFullError
from conveyor.later import LaterModule
from conveyor.refs.ref import Ref
from conveyor.runtime import context
from conveyor.user_frames import trimmed

if TYPE_CHECKING:
    import numpy as np
    import torch
else:
    np, torch = LaterModule("numpy"), LaterModule("torch")

# Rarely needed.
into_memory: Any = LaterModule("conveyor.direct.into")

T = TypeVar("T")
KeyT = TypeVar("KeyT")

#: More bytes than any arena has: what is larger fits no number of the native core's, and is refused as this
#: is.
_MOST = 1 << 62


@overload
def get(refs: Ref[T], *, timeout: float | None = None, into: Any = None, **rays: Any) -> T: ...
@overload
def get(
    refs: Sequence[Ref[T]], *, timeout: float | None = None, into: Any = None, **rays: Any
) -> list[T]: ...
@overload
def get(
    refs: Mapping[KeyT, Ref[T]], *, timeout: float | None = None, into: Any = None, **rays: Any
) -> dict[KeyT, T]: ...
@overload
def get(
    refs: Sequence[Any] | Mapping[Any, Any],
    *,
    timeout: float | None = None,
    into: Any = None,
    **rays: Any,
) -> Any: ...


def get(refs: Any, *, timeout: float | None = None, into: Any = None, **rays: Any) -> Any:
    """Wait for the value of a reference, or of each in a list of them.

    Args:
        refs: a reference, as returned by ``remote``, ``put`` and a graph's ``execute``, or a list
            of references. It can be got again, and gives another value like it.
        timeout: seconds to wait for all of them; without it, as long as it takes.
        into: of one reference: a tensor or an array that its value is written to, and that is returned; a
            list of them, one for each tensor and array in the value; or a mapping, such as a ``state_dict``,
            with one wherever the value has one. Of several references: a list, or mapping, with as much for
            each of them.
        rays: ``_use_object_store`` and ``_tensor_transport``, by which Ray's programs say how a value is
            to be fetched that has stayed on its actor. The way is found without them.

    Raises:
        TaskError: the method raised; also an instance of the exception's own class.
        ActorDiedError: the actor has died.
        WaitTimeoutError: the timeout is over; the same call can be tried again.
        ValueError: ``into`` does not fit the value; nothing has been written to it then.
    """
    __tracebackhide__ = True  # by pytest
    try:
        if rays:
            check_get_options(rays)
        # The class of a ref is a native one, whose isinstance() costs more than a look at a list's type.
        if type(refs) is not list and isinstance(refs, Ref):
            if into is not None:
                return _get_into(refs, into, timeout)
            return refs.get(timeout)
        if into is not None:
            if not isinstance(refs, (list, tuple, Mapping)):
                raise TypeError(f"get takes references, not a {type(refs).__name__}")
            each = into_memory.get_each_into
            return _core.with_fetch_limit(timeout, each, refs, into, timeout)
        return context.current().get(refs, timeout)
    except Exception as error:
        raise trimmed(error)  # noqa: B904


def _get_into(ref: Ref, into: Any, timeout: float | None) -> Any:
    return _core.with_fetch_limit(timeout, into_memory.get_into, ref, into, timeout)


def put(
    value: T,
    *,
    tensor_transport: str | None = None,
    snapshot: bool = False,
    _tensor_transport: str | None = None,
) -> Ref[T]:
    """Keep ``value`` for others, and return a reference to it.

    Args:
        tensor_transport: its tensors and arrays stay where they are, and whoever needs them fetches them
            here; as for ``conveyor.method``. ``None``: the value is kept as it is now, in a copy.
        snapshot: with a transport: they stay as they are now, in a copy.
        _tensor_transport: Ray's name for ``tensor_transport``.

    Raises:
        TypeError: ``value`` is a reference, or both names of the transport are given.
        ValueError: no such transport.
    """
    __tracebackhide__ = True  # by pytest
    try:
        if tensor_transport is not None and _tensor_transport is not None:
            raise TypeError(
                "put takes tensor_transport, or _tensor_transport as Ray calls it, and not both"
            )
        chosen = tensor_transport if _tensor_transport is None else _tensor_transport
        transport = check_transport(chosen)
        check_snapshot(snapshot, transport)
        ref: Ref[T] = context.current().put(value, transport, snapshot)
        return ref
    except Exception as error:
        raise trimmed(error)  # noqa: B904


def wait(
    refs: Sequence[Ref[T]],
    *,
    num_returns: int = 1,
    timeout: float | None = None,
    fetch_local: bool = True,
) -> tuple[list[Ref[T]], list[Ref[T]]]:
    """Wait until some references have their values (or their errors).

    Args:
        refs: a list of different references; of none, both lists that come back are empty.
        num_returns: how many of them to wait for.
        timeout: seconds after which to return with fewer.
        fetch_local: accepted for Ray code; on one machine all values are local.

    Returns:
        Those that are ready, at most ``num_returns`` of them, and the rest, in the order given.
    """
    __tracebackhide__ = True  # by pytest
    try:
        given: Any = refs
        if isinstance(given, (str, bytes)) or not isinstance(given, Sequence):
            raise TypeError(f"wait() takes a list of references, not {type(given).__name__}")
        if not given:
            return [], []
        wanted = f"from 1 to the number of references, which is {len(refs)}"
        check_count(num_returns, "num_returns", wanted, 1, len(refs))
        return context.current().wait(refs, num_returns, timeout)
    except Exception as error:
        raise trimmed(error)  # noqa: B904


def cancel(ref: Ref, *, force: bool = False, recursive: bool = True) -> None:
    """Cancel the call or execution that ``ref`` is a result of; do nothing if it is done already.
    ``ref.cancel()`` also says whether it came in time.

    Args:
        force: accepted for Ray code. A method that runs is not interrupted; ``kill`` ends its actor.
        recursive: accepted for Ray code. What the method has called goes on.

    Raises:
        TypeError: ``ref`` is no reference.
    """
    if not isinstance(ref, Ref):
        raise TypeError(f"cancel() takes a reference, not {type(ref).__name__}")
    ref.cancel()


def kill(actor: AnyActor, *, no_restart: bool = True, graceful: bool = False) -> None:
    """End an actor at once, whatever it does. All who wait for it get ``ActorDiedError``.

    Args:
        no_restart: with ``False`` an actor that was started with ``max_restarts`` is started again, if
            any are left.
        graceful: end it in good order instead: what it runs is done, calls that it has not begun
            are dropped, then it ends as a program does, with its ``__conveyor_exit__`` method. Returns
            when it has ended. One that has not within the session's ``grace_seconds`` is killed. An
            actor that ends itself this way goes on until its method returns.
    """
    if not isinstance(actor, ActorHandle):
        raise TypeError(f"kill() takes an actor's handle, not {type(actor).__name__}")
    check_flag(no_restart, "no_restart")
    check_flag(graceful, "graceful")
    check_usable(actor)
    actor._runtime.kill(actor._id, no_restart, graceful)


def get_actor(name: str) -> ActorHandle:
    """Return a handle of the actor that was started with ``options(name=name)``.

    Raises:
        ValueError: there is no such actor, or its constructor has raised.
    """
    if not isinstance(name, str):
        raise TypeError(f"an actor's name is a str, not {type(name).__name__}")
    runtime = context.current()
    actor, class_name, methods, retained = runtime.find_actor(name)
    return ActorHandle(runtime, class_name, make_table(methods), actor, retained)


def empty(shape: int | Sequence[int], dtype: Any = float) -> np.ndarray[Any, Any]:
    """An uninitialised numpy array in this process's arena.

    shape, dtype: as for ``numpy.empty`` (C order). Sent as a whole by a maker that keeps no
    reference to it (``return array`` in an actor; ``graph.execute(make())`` in the driver), its
    memory itself travels and the cost does not depend on its size. A maker that still holds it, or
    a view of it, sends a copy, so nobody sees later writes; and so does one that sends another
    library's view of it, such as ``torch.from_numpy(array)``. Raises ``MemoryError`` at the memory cap.
    """
    kind = np.dtype(dtype)
    if kind.hasobject:
        raise TypeError(f"arrays of {kind} hold Python objects and cannot lie in shared memory")
    sizes = check_shape(shape)
    buffer = _allocate(math.prod(sizes) * kind.itemsize)
    array: np.ndarray[Any, Any] = np.ndarray(sizes, kind, buffer=buffer)
    return array


def empty_tensor(shape: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """An uninitialised CPU tensor in this process's arena; see :func:`empty`."""
    kind = torch.get_default_dtype() if dtype is None else dtype
    if not isinstance(kind, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, such as torch.float32, not {dtype!r}")
    sizes = check_shape(shape)
    count = math.prod(sizes)
    if count == 0:
        return torch.empty(sizes, dtype=kind)
    buffer = _allocate(count * kind.itemsize)
    tensor = torch.frombuffer(buffer, dtype=kind, count=count).view(sizes)
    buffer.made_for(tensor.untyped_storage()._cdata)
    return tensor


def _allocate(size: int) -> Any:
    runtime = context.current()
    if size <= _MOST:
        return runtime.allocate(size)
    try:
        return runtime.allocate(_MOST)
    except ArenaFullError as error:
        error.args = (str(error).replace(str(_MOST), str(size), 1), *error.args[1:])
        raise
