"""Getting values into memory that is there already: which, and how it is filled."""

from __future__ import annotations

import functools
import inspect
import struct
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any

from conveyor import _core
from conveyor.checks import deadline_of, left_until
from conveyor.codec import arrays
from conveyor.codec.arrays import ARRAY
from conveyor.codec.direct import Located, Unfetched, fetched
from conveyor.codec.errors import note_not_begun
from conveyor.codec.pickling.unpickler import uncollected
from conveyor.codec.tensors import encoding as tensor_headers
from conveyor.codec.tensors.encoding import TENSOR
from conveyor.device import base as devices
from conveyor.direct.fetching import read_into, when_there
from conveyor.direct.memory import (
    address_of,
    hold_memory,
    is_array,
    is_plain,
    is_tensor,
    lies_at,
    memory_of,
    nbytes_of,
    range_to_fill,
    storage_of,
)
from conveyor.direct.parts import Skeleton
from conveyor.direct.structure import (
    Path,
    Pickled,
    Walked,
    is_data,
    is_leaf,
    leaves_of,
    named,
    unpacked,
)
from conveyor.exceptions import SerializationError
from conveyor.refs.ref import DeferredArgument, Ref
from conveyor.refs.streams import StreamRef

#: Memory of a target: device, address and bytes.
Region = tuple[str, int, int]


def region_of(one: Any) -> Region:
    """Return the region of a tensor or an array that has memory of its own."""
    return _where(one), address_of(one), nbytes_of(one)


def sharing(regions: Sequence[Region]) -> Iterator[tuple[int, int]]:
    """Pairs of targets, by their numbers, that have memory in common: enough of them for each that does."""
    ordered = sorted([(*region, i) for i, region in enumerate(regions) if region[2]])
    last = None  # of those before, the one that reaches furthest
    for where, start, size, i in ordered:
        if last is not None and last[0] == where and start < last[1]:
            yield last[2], i
        if last is None or last[0] != where or start + size > last[1]:
            last = where, start + size, i


def check_shares(
    found: Sequence[tuple[Path, Any]], targets: Sequence[Any], regions: Sequence[Region]
) -> bool:
    """Raise if memory of ``targets``, which lie in ``regions``, is to take two parts of the value that are
    not the same memory: the last would be in both. Returns whether any of it is to take two parts.

    Raises:
        ValueError: it is.
    """
    shares = False
    for i, j in sharing(regions):
        shares = True
        (one_path, one), (other_path, other) = found[i], found[j]
        if not _is_shared(one, other, regions[j][1] - regions[i][1]):
            what = (
                "one target is to take"
                if targets[i] is targets[j]
                else "the same memory is to take"
            )
            parts = sorted([(i, one_path), (j, other_path)])
            first, second = [named([path]) for _, path in parts]
            raise ValueError(f"{what} both {first} and {second}")
    return shares


def _is_shared(one: Any, other: Any, distance: int) -> bool:
    """Whether ``other`` lies ``distance`` bytes behind ``one``, element by element."""
    if one is other:
        return not distance
    if _where(one) != _where(other) or address_of(other) - address_of(one) != distance:
        return False
    return is_plain(one) and is_plain(other)


def _where(one: Any) -> str:
    return str(one.device) if is_tensor(one) and not one.is_cpu else "cpu"


def unwritten(leaves: Sequence[Any], targets: Sequence[Any]) -> list[Any]:
    """Return the leaf that each of ``targets`` is to take. It is a copy of the leaf if some target is to be
    written to where the leaf lies."""
    written: dict[str, list[tuple[int, int]]] = {}
    for leaf, target in zip(leaves, targets, strict=True):
        if nbytes_of(target) and not is_there(leaf, target):
            start = address_of(target)
            written.setdefault(_where(target), []).append((start, start + nbytes_of(target)))
    furthest = {}
    for where, ranges in written.items():
        ranges.sort()
        furthest[where] = list(accumulate((end for _, end in ranges), max))
    taken = []
    for leaf, target in zip(leaves, targets, strict=True):
        ranges = written.get(_where(leaf), [])
        if ranges and not is_there(leaf, target) and _has_memory(leaf):
            start, size = (
                (address_of(leaf), nbytes_of(leaf)) if is_plain(leaf) else storage_of(leaf)
            )
            before = bisect_left(ranges, (start + size,))
            if before and furthest[_where(leaf)][before - 1] > start:
                leaf = leaf.detach().clone() if is_tensor(leaf) else leaf.copy()
        taken.append(leaf)
    return taken


def is_there(leaf: Any, target: Any) -> bool:
    """Whether the target has the leaf's elements already, since it is the same memory."""
    if leaf is target:
        return True
    return _where(leaf) == _where(target) and lies_at(leaf, address_of(target))


def _has_memory(leaf: Any) -> bool:
    return bool(nbytes_of(leaf)) and (not is_tensor(leaf) or str(leaf.layout) == "torch.strided")


_RANGE = struct.Struct("<QQ")


def get_into(ref: Ref, into: Any, timeout: float | None) -> Any:
    """The value of ``ref`` in the memory of ``into``: a tensor or an array; a list of them, one for each
    tensor and array in the value, in the order in which its pickler comes to them, also in objects; or a
    mapping, or nested lists and mappings, with one wherever the lists, tuples and mappings of the value have
    one.

    Returns ``into`` itself for a single one, else the value with these in the places of its own.

    Raises:
        TypeError: one of them is neither, or of a device that is not known.
        ValueError: one of them is read-only or not contiguous, they do not fit the value, or two share memory
            that the value has apart. Nothing has been written then.
        ActorDiedError, ObjectLostError, WaitTimeoutError: as ``get``.
    """
    with uncollected():
        targets = Targets(into)
    waits = not ref.done()
    ref._resolved(timeout)
    if waits:
        targets.find_ranges()
    return receive(ref._unfetched(), targets)


def get_each_into(refs: Any, into: Any, timeout: float | None) -> Any:
    """The value of each of ``refs`` in the memory of what has the same place in ``into``: lists, or mappings
    with the same keys. All are waited for first.

    Raises as :func:`get_into`; those before the one that does not fit have been written then.
    """
    if isinstance(refs, Mapping):
        if not isinstance(into, Mapping) or set(refs) != set(into):
            raise ValueError("into= for a mapping of references is a mapping with the same keys")
        ahead = [(refs[key], Targets(into[key])) for key in refs]
    else:
        if not isinstance(into, (list, tuple)) or len(refs) != len(into):
            raise ValueError(
                f"into= for {len(refs)} references is a list with something to take each of them"
            )
        ahead = [(ref, Targets(one)) for ref, one in zip(refs, into, strict=True)]
    for ref, _ in ahead:
        if not isinstance(ref, Ref):
            raise TypeError(f"get takes references, and one is a {type(ref).__name__}")
    _check_no_overlap(ahead)
    end = deadline_of(timeout)
    for ref, _ in ahead:
        ref._resolved(left_until(end))
    received = []
    for ref, targets in ahead:
        targets.find_ranges()
        received.append(receive(ref._unfetched(), targets))
    return dict(zip(refs, received, strict=True)) if isinstance(refs, Mapping) else received


def _check_no_overlap(ahead: Sequence[tuple[Ref, Targets]]) -> None:
    """Raise if two references are to be received into the same memory."""
    every = [
        (i, targets.region_of(one)) for i, (_, targets) in enumerate(ahead) for one in targets.all
    ]
    for a, b in sharing([region for _, region in every]):
        i, j = sorted([every[a][0], every[b][0]])
        if ahead[i][0] is not ahead[j][0]:
            raise ValueError(
                f"the same memory is to take both the value of reference {i} and that of reference {j}"
            )


class Targets:
    """Tensors and arrays that a value is to be written to. Raises as :func:`get_into`.

    single: there is one, which is not in a container.
    """

    def __init__(self, into: Any, what: str = "into=") -> None:
        self._what = what
        self.single = is_leaf(into)
        # By their order, or else by their paths.
        flat = isinstance(into, (list, tuple)) and not any(map(_is_container, into))
        self._all: dict[Any, Any] = dict(enumerate(into) if flat else leaves_of(into))
        self._by_path = not flat and not self.single
        if self._by_path and not self._all:
            given = f"a value of type {type(into).__name__}"
            raise TypeError(
                f"{what} takes a tensor, an array, or a list of them, or a mapping with some of them in it, "
                f"not {given}{' with none in it' if _is_container(into) else ''}"
            )
        self.ranges: dict[int, tuple[int, int] | None] = {}
        self.find_ranges()

    def find_ranges(self) -> None:
        """Find where the targets lie, also once more: others may have changed them while the value was waited
        for. The memory stays theirs as long as this object is there, whatever becomes of them."""
        self._held = [hold_memory(one) for one in self._all.values()]
        self.ranges = {id(one): self._range_of(key, one) for key, one in self._all.items()}

    def _range_of(self, key: Any, one: Any) -> tuple[int, int] | None:
        try:
            return range_to_fill(one)
        except (TypeError, ValueError) as error:
            if self.single:
                raise
            where = named([key if self._by_path else (key,)])
            raise type(error)(f"{where} of {self._what.removesuffix('=')}: {error}") from None

    def region_of(self, one: Any) -> Region:
        """Return the region of one of the targets."""
        target_range = self.ranges[id(one)]
        return region_of(one) if target_range is None else ("cpu", *target_range)

    @property
    def all(self) -> list[Any]:
        """Return all targets, in order."""
        return list(self._all.values())

    def unpack(self, value: Any, fresh: bool) -> Walked | Pickled:
        """``value`` taken apart. What is told by its path is not inside of objects, nor are they looked into
        where there is one for each tensor and array beside them: to be put together they are loaded again."""
        walked = Walked(value, fresh)
        found = walked.leaves
        fits = len(self._all) in (len(found), len({id(leaf) for _, leaf in found}))
        return walked if self._by_path or (fits and found) else unpacked(value, fresh)

    def for_leaves(self, parts: Walked | Pickled) -> list[Any]:
        """The one for each of the tensors and arrays that a value has.

        Raises:
            ValueError: they do not fit.
        """
        found = parts.leaves
        targets = self._by_paths(found) if self._by_path else self._in_order(found, parts.unseen)
        for (path, leaf), target in zip(found, targets, strict=True):
            if leaf.dtype is target.dtype and leaf.shape == target.shape:
                continue
            there, given = _described(leaf), _described(target)
            if there != given:
                of = "" if len(found) == 1 else named([path]) + " of "
                raise ValueError(
                    f"{of}the value is {_in_words(there)}, and what is to take it is {_in_words(given)}"
                )
        return targets

    def _in_order(self, found: Sequence[tuple[Path, Any]], unseen: str) -> list[Any]:
        targets = self.all
        if len(targets) == len(found):
            return targets
        # What is in it twice may be taken once.
        once = list(dict.fromkeys(id(leaf) for _, leaf in found))
        if len(targets) != len(once):
            where = f" in its lists, tuples and mappings (its objects cannot be pickled: {unseen})"
            raise ValueError(
                f"the value has {len(found)} tensors and arrays{where if unseen else ''}, and there are "
                f"{len(targets)} to take them"
            )
        return [targets[once.index(id(leaf))] for _, leaf in found]

    def _by_paths(self, found: Sequence[tuple[Path, Any]]) -> list[Any]:
        targets = [self._all.get(path) for path, _ in found]
        if len(targets) == len(self._all) and not any(one is None for one in targets):
            return targets
        paths = dict(found)
        lacking = [path for path in paths if path not in self._all]
        unknown = [path for path in self._all if path not in paths]
        if lacking or unknown:
            wrong = []
            if lacking:
                wrong.append(f"{self._what} has nothing to take {named(lacking)}")
            if unknown:
                wrong.append(f"the value has nothing for {named(unknown)}")
            raise ValueError(", and ".join(wrong))
        return [self._all[path] for path, _ in found]


def _is_container(value: Any) -> bool:
    return isinstance(value, (list, tuple, Mapping))


def receive(value: Any, targets: Targets) -> Any:
    """``value``, which may be elsewhere, in the memory of ``targets``; see :func:`get_into`."""
    fresh = False
    if isinstance(value, Unfetched):
        where = value.where
        # A part is less than what is kept, and a snapshot is read as by others.
        here = None if where.joined or where.snapshot else value.here()
        fresh = here is None
        value, is_done = _fetched(value, targets) if here is None else (here.value, False)
        if is_done:
            return value
    if targets.single and hasattr(value, "dtype") and not is_leaf(value):
        value = _as_array(value)  # a part of one element is a scalar, of NumPy's
    parts = targets.unpack(value, fresh)
    taking = targets.for_leaves(parts)
    check_shares(parts.leaves, taking, [targets.region_of(one) for one in taking])
    leaves = [leaf for _, leaf in parts.leaves]
    _copy(leaves if fresh else unwritten(leaves, taking), taking)
    return taking[0] if targets.single else parts.put_together(taking)


def _as_array(scalar: Any) -> Any:
    import numpy as np

    return np.asarray(scalar)


def _fetched(unfetched: Unfetched, targets: Targets) -> tuple[Any, bool]:
    """The value, of which as much lies in the memory of ``targets`` as can be read there at once, and whether
    that is all: then ``targets`` are in it already."""
    where = unfetched.where
    if targets.single:
        [target] = targets.all
        target_range = targets.ranges[id(target)]
        if target_range is not None and _is_like(where, target):
            _tell_autograd([target])
            read_into(where, _RANGE.pack(*target_range))
            return target, True
    with uncollected():
        try:
            skeleton = Skeleton(where)
        except Exception:  # there is no room, or the user's code expects what is not there yet
            return unfetched.fetch(), False
        parts = targets.unpack(skeleton.value, True)
        if parts.unseen or (isinstance(parts, Pickled) and not skeleton.blind):
            return unfetched.fetch(), False  # the user's code expects it
        taking = targets.for_leaves(parts)
        shares = check_shares(parts.leaves, taking, [targets.region_of(one) for one in taking])
        if where.joined:
            return unfetched.fetch(), False
        # By the number of a range, the target that it is read into.
        readers: dict[int, tuple[Any, tuple[int, int]]] = {}
        at_once = True
        for (_, leaf), target in zip(parts.leaves, taking, strict=True):
            number, target_range = skeleton.range_of(leaf), targets.ranges[id(target)]
            if number is None or target_range is None:
                at_once = at_once and not nbytes_of(leaf)
            else:
                at_once = (
                    readers.setdefault(number, (target, target_range))[1] == target_range
                    and at_once
                )
        if not readers or (
            shares and _overlap([target_range for _, target_range in readers.values()])
        ):
            return unfetched.fetch(), False
    lengths = _core.lengths_of(where.ranges)
    _tell_autograd(taking)
    if at_once and len(readers) == skeleton.ranges and is_data(skeleton.value):
        ranges = [readers[i][1] if n else (0, 0) for i, n in enumerate(lengths)]
        read_into(where, b"".join([_RANGE.pack(*target_range) for target_range in ranges]))
        with uncollected():
            return parts.put_together(taking), True
    every: list[Any] = [
        memory_of(readers[i][0]) if i in readers else _core.Buffer.own(n)
        for i, n in enumerate(lengths)
    ]
    del skeleton, parts
    read_into(where, _core.ranges_of(every))
    return unfetched.decode_with(every), False


def _overlap(ranges: Iterable[tuple[int, int]]) -> bool:
    """Whether some of the ranges share memory, as those of targets do that are tied in another way than the
    value is."""
    ends = sorted((start, start + length) for start, length in ranges)
    return any(end > start for (_, end), (start, _) in pairwise(ends))


def _tell_autograd(targets: Sequence[Any]) -> None:
    """Tell autograd that these tensors are written to. A gradient for which one of them was saved then
    raises, as after any other write. Call it before the write, which may fail halfway."""
    tensors = [target for target in targets if is_tensor(target)]
    if tensors:
        from torch.autograd.graph import increment_version

        for target in tensors:
            if not target.is_inference():
                increment_version(target)


def _is_like(where: Located, target: Any) -> bool:
    """Whether the value is a single tensor, or array, like the target, which is the usual case."""
    if where.codec == TENSOR and is_tensor(target):
        return tensor_headers.describes(where.meta, target)
    return where.codec == ARRAY and is_array(target) and arrays.describes(where.meta, target)


def _described(leaf: Any) -> tuple[str, tuple[int, ...]]:
    return str(leaf.dtype).removeprefix("torch."), tuple(leaf.shape)


def _in_words(described: tuple[str, tuple[int, ...]]) -> str:
    dtype, shape = described
    return f"of {dtype} and shape {list(shape)}"


def _copy(leaves: Sequence[Any], targets: Sequence[Any]) -> None:
    """Write what does not lie there already."""
    streams: dict[Any, Any] = {}
    for leaf, target in zip(leaves, targets, strict=True):
        if is_there(leaf, target):
            continue
        if is_tensor(target):
            _copy_to_tensor(leaf, target, streams)
        else:
            target[...] = leaf.detach().cpu().numpy() if is_tensor(leaf) else leaf
    for stream in streams.values():
        stream.synchronize()


def _copy_to_tensor(leaf: Any, target: Any, streams: dict[Any, Any]) -> None:
    import torch

    with torch.no_grad():
        source = leaf if is_tensor(leaf) else torch.as_tensor(leaf)
        device = devices.of(target)
        if device is not None:
            # The host waits once, for all of them.
            index = target.device.index
            streams.setdefault((device.kind, index), device.current_stream(index))
            device.copy(target.detach(), source.detach())
        else:
            target.copy_(source)


#: By parameter: the path of an attribute of the instance, or a function of the instance.
ReceiveInto = Mapping[str, "str | Callable[[Any], Any]"]


def receiving(function: Callable[..., Any], receive_into: ReceiveInto) -> Callable[..., Any]:
    """Wrap the method ``function`` so that it finds these arguments in memory of its instance."""
    signature = inspect.signature(function)

    def to_receive(bound: inspect.BoundArguments, instance: Any) -> Iterator[_Argument]:
        for name, into in receive_into.items():
            if name in bound.arguments:
                value = bound.arguments[name]
                yield _Argument(function.__name__, name, value, instance, into)

    def received(args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments:
        bound = signature.bind(*args, **kwargs)
        with _not_begun():
            for one in to_receive(bound, args[0]):
                bound.arguments[one.name] = one.receive()
        return bound

    async def received_later(
        args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> inspect.BoundArguments:
        bound = signature.bind(*args, **kwargs)
        with _not_begun():
            for one in to_receive(bound, args[0]):
                bound.arguments[one.name] = await when_there(one.receive)
        return bound

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = received(args, kwargs)
        return function(*bound.args, **bound.kwargs)

    if inspect.isasyncgenfunction(function):

        @functools.wraps(function)
        async def items_later(*args: Any, **kwargs: Any) -> Any:
            bound = await received_later(args, kwargs)
            async for item in function(*bound.args, **bound.kwargs):
                yield item

        return items_later
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def call_later(*args: Any, **kwargs: Any) -> Any:
            bound = await received_later(args, kwargs)
            return await function(*bound.args, **bound.kwargs)

        return call_later
    if inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def items(*args: Any, **kwargs: Any) -> Any:
            return (yield from call(*args, **kwargs))

        return items
    return call


@contextmanager
def _not_begun() -> Iterator[None]:
    """Mark each error raised inside as raised in the place of a method, which will not run."""
    try:
        yield
    except Exception as error:
        note_not_begun(error)
        raise


class _Argument:
    """Argument that is received into memory of the instance."""

    def __init__(self, method: str, name: str, value: Any, instance: Any, path: Any) -> None:
        self._method, self.name = method, name
        self._value = value
        self._path = path
        self._into = path(instance) if callable(path) else _found(method, name, instance, path)

    def receive(self) -> Any:
        """Return the argument, in its place. A call that was broken off can be repeated."""
        value = self._value
        try:
            targets = Targets(self._into, f"receive_into of {self.name!r}")
            if type(value) is not DeferredArgument:
                return receive(value, targets)
            made = receive(value.value, targets)
            value.fetched()
            return made
        except (TypeError, ValueError) as error:
            if type(error) not in (TypeError, ValueError):
                raise  # it is of the value, and says so
            where = "" if callable(self._path) else f" into self.{self._path}"
            raise type(error)(
                f"{self._method}() cannot receive {self.name!r}{where}: {error}"
            ) from None


def _found(method: str, name: str, instance: Any, path: str) -> Any:
    found = instance
    for part in path.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            raise AttributeError(
                f"{method}() cannot receive {name!r} into self.{path}: {error}"
            ) from None
    return found() if callable(found) and not is_leaf(found) else found


def set_target_for_ref(ref: Ref, target: Any) -> None:
    """Have ``get`` and ``await`` of ``ref`` give the tensors and arrays of its value in memory that is there.
    ``conveyor.get(ref, into=...)`` does the same at once.

    They give the value with these very objects in it. Nothing holds them meanwhile: once one of them is
    garbage, the value is fetched into new memory. It holds for this object, not for what it is pickled to,
    and until this or :func:`set_target_device_for_ref` is called again.

    Args:
        target: a list of tensors or arrays, one for each in the value, in the order in which its pickler
            comes to them, also in objects. Whether they fit is looked at by ``get``, which raises
            ``ValueError`` before anything is written.

    Raises:
        TypeError: ``ref`` is no reference to one value, or ``target`` is no list of tensors and arrays.
    """
    _check_ref(ref)
    buffers = [target] if is_leaf(target) else target
    if isinstance(buffers, Mapping) or not isinstance(buffers, (list, tuple)):
        raise TypeError(f"a list of tensors or arrays is needed, not a {type(target).__name__}")
    for one in buffers:
        if not is_leaf(one):
            raise TypeError(f"a list of tensors or arrays is needed, and one is {one!r}")
    ref._targets = [weakref.ref(one) for one in buffers]


def set_target_device_for_ref(ref: Ref, device: Any) -> None:
    """Have ``get`` and ``await`` of ``ref`` give the tensors of its value on a device: ``"cpu"``,
    ``"cuda:0"``. It holds as long as :func:`set_target_for_ref` does.

    Raises:
        TypeError: ``ref`` is no reference to one value, or ``device`` does not name a device.
        ValueError: there is no such device in this process.
    """
    _check_ref(ref)
    ref._targets = checked_device(device)


def _check_ref(ref: Any) -> None:
    if not isinstance(ref, Ref) or isinstance(ref, StreamRef):
        raise TypeError(f"a reference to one value is needed, not a {type(ref).__name__}")


def checked_device(device: Any) -> str:
    """The device's name, as torch has it.

    Raises:
        TypeError: it names none.
        ValueError: there is no such device in this process.
    """
    import torch

    if not isinstance(device, (str, torch.device)):
        raise TypeError(f"a device is a name such as 'cuda:0', not {device!r}")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"there is no device {device!r}: {error}") from None
    if found.type == "cpu":
        return str(found)
    kind = devices.get(found.type)
    if kind is None:
        known = ", ".join(["cpu", *devices.kinds()])
        raise ValueError(f"there is no device {str(device)!r}; known are {known}")
    why_not = kind.viable()
    if why_not is not None:
        raise ValueError(f"there is no device {str(device)!r}: {why_not}")
    if found.index is not None and found.index >= kind.count():
        raise ValueError(
            f"there is no device {str(device)!r}: this process has {kind.count()} of that kind"
        )
    return str(found)


def receive_set(ref: Ref, targets: Any, timeout: float | None) -> Any:
    """Get the value of ``ref`` in the ``targets`` that were kept for it."""
    ref._resolved(timeout)
    value = ref._unfetched()
    if isinstance(targets, str):
        return on_device(value, targets)
    buffers = [target() for target in targets]
    if any(one is None for one in buffers):
        return fetched(value)
    return receive(value, Targets(buffers, "the target of a ref"))


def on_device(value: Any, device: str) -> Any:
    """``value``, which may be elsewhere, with its tensors on ``device``.

    Raises:
        SerializationError: it has objects that cannot be pickled, whose tensors are not known.
    """
    is_here = not isinstance(value, Unfetched) or value.here() is not None
    parts = unpacked(fetched(value), fresh=not is_here)
    if parts.unseen:
        raise SerializationError(
            f"the tensors of the value cannot be had on {device}: its objects cannot be pickled, and are "
            f"looked into in no other way ({parts.unseen})"
        )
    moved = {id(leaf): leaf.to(device) for _, leaf in parts.leaves if is_tensor(leaf)}
    return parts.put_together([moved.get(id(leaf), leaf) for _, leaf in parts.leaves])
