"""Checks that every transport must pass: one for graphs, in graphs that use it, and one for direct objects.

Each check of the former compiles graphs over actors of its own, in the running session or a new one. The
session and the actors are left for the next check.
"""

from __future__ import annotations

import functools
import gc
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import conveyor
from conveyor import device as devices
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.device import Device
from conveyor.direct.managers.manager import TensorTransportManager, TensorTransportMetadata
from conveyor.direct.managers.registry import register_tensor_transport, route
from conveyor.exceptions import ActorDiedError, ConveyorError, TaskError
from conveyor.transport import registry


@dataclass
class Batch:
    """A value of a user's own class."""

    tokens: Any
    label: str


def _dtypes() -> Any:
    import torch

    kinds = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8]
    kinds += [torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64]
    return [torch.arange(7).to(dtype) for dtype in kinds]


def _shapes() -> Any:
    import torch

    shapes = [(), (0,), (1,), (3, 0, 2), (5, 4), (2, 3, 4, 5)]
    return [
        torch.arange(max(1, torch.Size(s).numel()))[: torch.Size(s).numel()].reshape(s)
        for s in shapes
    ]


def _layouts() -> Any:
    import torch

    base = torch.arange(60.0).reshape(3, 4, 5)
    image = torch.arange(48.0).reshape(1, 3, 4, 4)
    channels_last = image.to(memory_format=torch.channels_last)
    return [
        base.transpose(0, 2),
        base[:, ::2],
        base[1],
        base[..., 3],
        channels_last,
        base.expand(2, 3, 4, 5),
    ]


def _nested() -> Any:
    import torch

    return {
        "batch": Batch(torch.arange(5), "five"),
        "list": [torch.ones(2, 2), "text", 3, None, (torch.zeros(1), {"deep": torch.eye(3)})],
        7: b"bytes",
    }


def _aliases() -> Any:
    import torch

    base = torch.arange(100.0)
    return [base, base, base[10:20], base.reshape(10, 10)[:, 3]]


def _gradients() -> Any:
    import torch

    return [torch.ones(3, requires_grad=True), torch.nn.Parameter(torch.ones(2)), torch.ones(1)]


def _plain() -> Any:
    return {"no": "tensor", "numbers": [1, 2.5, None]}


def _lone() -> Any:
    import torch

    return torch.linspace(0, 1, 11)


def _many() -> Any:
    import torch

    return [torch.full((n % 7 + 1,), float(n)) for n in range(500)]


_samples: dict[str, Callable[[], Any]] = {
    "aliases": _aliases,
    "dtypes": _dtypes,
    "gradients": _gradients,
    "layouts": _layouts,
    "lone": _lone,
    "many": _many,
    "nested": _nested,
    "plain": _plain,
    "shapes": _shapes,
}

KINDS = tuple(_samples)


def sample(kind: str) -> Any:
    """Make the value of that name, which is the same each time."""
    return _samples[kind]()


def difference(got: Any, wanted: Any, at: str = "value") -> str:
    """Say where two values differ; empty if they do not."""
    import torch

    if type(got) is not type(wanted):
        return f"{at} is a {type(got).__name__}, not a {type(wanted).__name__}"
    if isinstance(wanted, torch.Tensor):
        if got.device.type != wanted.device.type:
            return f"{at} is on {got.device}, not {wanted.device}"
        for what in ("dtype", "shape", "requires_grad"):
            if getattr(got, what) != getattr(wanted, what):
                return f"{at} has {what} {getattr(got, what)}, not {getattr(wanted, what)}"
        return "" if torch.equal(got, wanted) else f"{at} has other elements"
    if isinstance(wanted, Batch):
        got, wanted = vars(got), vars(wanted)
    if isinstance(wanted, dict):
        if list(got) != list(wanted):
            return f"{at} has keys {list(got)}, not {list(wanted)}"
        pairs = [(got[key], wanted[key], f"{at}[{key!r}]") for key in wanted]
    elif isinstance(wanted, (list, tuple)):
        if len(got) != len(wanted):
            return f"{at} has {len(got)} elements, not {len(wanted)}"
        pairs = [(g, w, f"{at}[{i}]") for i, (g, w) in enumerate(zip(got, wanted, strict=True))]
    else:
        return "" if got == wanted else f"{at} is {got!r}, not {wanted!r}"
    return next((text for pair in pairs if (text := difference(*pair))), "")


class Peer:
    """Actor that makes values with tensors, and describes the values that it gets."""

    def __init__(self, device: Device | None = None) -> None:
        """``device``: the device of its tensors; ``None``: the CPU."""
        self.device = "cpu" if device is None else device.kind
        self.held: list[Any] = []
        self.buffer: Any = None

    def make(self, kind: str) -> Any:
        """Make a sample, see :func:`conveyor.testing.conformance.sample`."""
        import torch

        with torch.device(self.device):
            return sample(kind)

    def make_or_raise(self, number: int) -> Any:
        """Make a tensor of ``number``; raise if it is odd."""
        import torch

        if number % 2:
            raise ValueError(f"{number} is odd")
        return torch.full((1000,), float(number), device=self.device)

    def make_big(self, number: int) -> Any:
        """Make 4 MiB of ``number``."""
        import torch

        made = torch.full((1 << 20,), float(number), device=self.device)
        return {"tensor": made, "number": number}

    def make_again(self, number: int) -> Any:
        """Make 4 MiB of ``number``, in the same memory as the last time."""
        import torch

        if self.buffer is None:
            self.buffer = torch.empty(1 << 20, device=self.device)
        return {"tensor": self.buffer.fill_(number), "number": number}

    def total(self, value: Any) -> tuple[int, float, float]:
        """Describe the contents of a value of :meth:`make_big`."""
        tensor = value["tensor"]
        return value["number"], float(tensor.min()), float(tensor.max())

    def mean(self, tensor: Any) -> float:
        """Return the mean of a tensor."""
        return float(tensor.mean())

    def same(self, value: Any, kind: str) -> str:
        """Say how ``value`` differs from the sample; empty if it does not."""
        import torch

        with torch.device(self.device):
            return difference(value, sample(kind))

    def keep(self, value: Any) -> int:
        """Hold a value for good."""
        self.held.append(value)
        return len(self.held)

    def forget(self) -> None:
        """Let go of all values that are held."""
        self.held.clear()

    def held_totals(self) -> list[tuple[int, float, float]]:
        """Describe the contents of the values that are held."""
        return [self.total(value) for value in self.held]

    def scribble(self, value: Any) -> float:
        """Write over a value that has come, and return what was in it."""
        before = float(value["tensor"].max())
        value["tensor"].zero_()
        return before

    def slow(self, value: Any) -> float:
        """Return the largest element of a value of :meth:`make_big`, after 50 ms."""
        time.sleep(0.05)
        return float(value["tensor"].max())

    def both(self, first: Any, second: Any) -> tuple[float, float]:
        """Return the largest elements of two values of :meth:`make_big`."""
        return float(first["tensor"].max()), float(second["tensor"].max())

    def meta(self, number: int) -> Any:
        """Make a tensor; every third one has no memory, so nothing can move it."""
        import torch

        return torch.full((10,), float(number), device="meta" if number % 3 == 0 else self.device)

    def holdings(self) -> tuple[int, int]:
        """Count this process's descriptors and threads."""
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    def die(self) -> None:
        """End this process at once."""
        os.kill(os.getpid(), 9)


RemotePeer = conveyor.remote(Peer)


#: Timeout of each step of a check, in seconds.
_TIME_LIMIT = 60.0


class Check(NamedTuple):
    """A requirement on a transport, with the function that checks it.

    name: the requirement in a word or two.
    run: checks it, given the name of a registered transport. Raises ``AssertionError`` with what was wrong.
    """

    name: str
    run: Callable[[str], None]

    def __str__(self) -> str:
        return self.name


def transport_checks(device: str = "cpu") -> tuple[Check, ...]:
    """List all checks, with tensors of that kind of device, for a parametrised test. ::

    @pytest.mark.parametrize("check", conveyor.testing.transport_checks(), ids=str)
    def test_my_transport(check):
        check.run("mine")
    """
    return tuple(
        [Check(run.__name__.strip("_"), functools.partial(_on, device, run)) for run in _CHECKS]
    )


def check_transport(name: str, device: str = "cpu") -> None:
    """Run all checks on the registered transport ``name``, with tensors of that kind of device.

    Raises:
        ValueError: there is no such transport, or no such device.
        AssertionError: some checks have failed; the message says which, and why.
    """
    if registry.get(name) is None:
        raise ValueError(f"no transport is registered as {name!r}")
    if device != "cpu" and devices.get(device) is None:
        raise ValueError(f"no device is registered as {device!r}")
    failed = []
    for check in transport_checks(device):
        try:
            check.run(name)
        except Exception as error:
            failed.append(f"{check.name}: {type(error).__name__}: {error}")
    if failed:
        raise AssertionError(f"{name!r} fails {len(failed)} checks:\n" + "\n".join(failed))


#: Stack whose last item is the device of the check that runs.
_kinds = ["cpu"]


def _on(device: str, run: Callable[[str], None], name: str) -> None:
    """Run a check with tensors of a device."""
    _kinds.append(device)
    try:
        run(name)
    finally:
        _kinds.pop()


#: Actors that no check uses now, by device. Starting one takes longer than most checks, since it imports
#: torch.
_idle: dict[str, list[Any]] = {}


@contextmanager
def _peers(count: int) -> Iterator[list[Any]]:
    """Lend actors to a check. If the check raises, they are killed; otherwise other checks use them again."""
    lent: list[Any] = []
    kind = _kinds[-1]
    idle = _idle.setdefault(kind, [])
    while idle and len(lent) < count:
        peer = idle.pop()
        with suppress(ConveyorError):  # its session has ended
            _get(peer.forget.remote())
            lent.append(peer)
    while len(lent) < count:
        lent.append(RemotePeer.remote(devices.get(kind)))
    try:
        yield lent
    except BaseException:
        for peer in lent:
            conveyor.kill(peer)
        raise
    idle.extend(lent)


@contextmanager
def _mortal_peers(count: int, **options: Any) -> Iterator[list[Any]]:
    """Make actors that a check may kill, and kill them at the end."""
    on = devices.get(_kinds[-1])
    made = [RemotePeer.options(**options).remote(on) for _ in range(count)]
    try:
        yield made
    finally:
        for peer in made:
            conveyor.kill(peer)


@contextmanager
def _compiled(root: Any, **options: Any) -> Iterator[Any]:
    graph = root.compile(**options)
    try:
        yield graph
    finally:
        graph.teardown()


def _get(what: Any) -> Any:
    return conveyor.get(what, timeout=_TIME_LIMIT)


def _expect(got: Any, wanted: Any, what: str) -> None:
    if got != wanted:
        raise AssertionError(f"{what}: {got!r} instead of {wanted!r}")


def _expect_error(ref: Any, *kinds: type[BaseException]) -> BaseException:
    try:
        value = _get(ref)
    except kinds as error:
        return error
    raise AssertionError(f"{value!r} instead of an error")


def _chain(name: str, producer: Any, method: str, reader: Any, looks: str) -> Any:
    with InputNode() as inp:
        made = getattr(producer, method).bind(inp).with_tensor_transport(name)
        return getattr(reader, looks).bind(made)


def _values(name: str) -> None:
    """Values of each kind come unchanged."""
    with _peers(2) as (a, b), InputNode() as inp:
        root = b.same.bind(a.make.bind(inp).with_tensor_transport(name), inp)
        with _compiled(root) as graph:
            for kind in KINDS:
                _expect(_get(graph.execute(kind)), "", kind)


def _many_under_way(name: str) -> None:
    """Executions that are under way at the same time do not get each other's tensors."""
    with _peers(2) as (a, b), _compiled(_chain(name, a, "make_big", b, "total"), depth=8) as graph:
        refs = [graph.execute(number) for number in range(40)]
        for number, ref in enumerate(refs):
            _expect(_get(ref), (number, float(number), float(number)), f"execution {number}")


def _several_readers(name: str) -> None:
    """Each reader gets all values, and so does the executor."""
    with _peers(3) as (a, b, c), InputNode() as inp:
        made = a.make_big.bind(inp).with_tensor_transport(name)
        root = MultiOutputNode([b.total.bind(made), c.scribble.bind(made), made])
        with _compiled(root, depth=4) as graph:
            for number in range(1, 9):
                first, second, value = _get(graph.execute(number))
                _expect(first, (number, float(number), float(number)), "the first reader")
                _expect(second, float(number), "the second reader")
                _expect(float(value["tensor"].max()), float(number), "the executor")


def _two_edges(name: str) -> None:
    """An actor that reads from two others gets the values of both."""
    with _peers(3) as (a, b, c), InputNode() as inp:
        left = a.make_big.bind(inp).with_tensor_transport(name)
        right = b.make_big.bind(inp).with_tensor_transport(name)
        with _compiled(c.both.bind(left, right), depth=4) as graph:
            refs = [graph.execute(number) for number in range(12)]
            for number, ref in enumerate(refs):
                _expect(_get(ref), (float(number), float(number)), f"execution {number}")


def _values_are_safe(name: str) -> None:
    """A value that is held does not change, and writing to it changes nothing of any other process."""
    with _peers(2) as (a, b):
        with _compiled(_chain(name, a, "make_big", b, "keep"), depth=4) as graph:
            for number in range(10):
                _get(graph.execute(number))
        with _compiled(_chain(name, a, "make_big", b, "scribble"), depth=4) as graph:
            for number in range(10):
                _expect(_get(graph.execute(number)), float(number), "before it is written to")
        wanted = [(number, float(number), float(number)) for number in range(10)]
        _expect(_get(b.held_totals.remote()), wanted, "the values that are held")


def _memory_is_used_again(name: str) -> None:
    """After sending, the writer may write to the memory again, in its next task."""
    with (
        _peers(2) as (a, b),
        _compiled(_chain(name, a, "make_again", b, "total"), depth=8) as graph,
    ):
        refs = [graph.execute(number) for number in range(16)]
        for number, ref in enumerate(refs):
            _expect(_get(ref), (number, float(number), float(number)), f"execution {number}")


def _errors_are_values(name: str) -> None:
    """An error takes the tensors' place, and does not harm the next execution."""
    with _peers(2) as (a, b), _compiled(_chain(name, a, "make_or_raise", b, "mean")) as graph:
        refs = [graph.execute(number) for number in range(10)]
        for number, ref in enumerate(refs):
            if number % 2:
                error = _expect_error(ref, ValueError)
                _expect(f"{number} is odd" in str(error), True, str(error))
            else:
                _expect(_get(ref), float(number), f"execution {number}")


def _what_cannot_go(name: str) -> None:
    """A tensor that cannot be moved makes its execution fail, with an error that says where and why."""
    with _peers(2) as (a, b), _compiled(_chain(name, a, "meta", b, "mean")) as graph:
        refs = [graph.execute(number) for number in range(9)]
        for number, ref in enumerate(refs):
            if number % 3 == 0:
                error = _expect_error(ref, TaskError)
                _expect("meta" in str(error), True, str(error))
            else:
                _expect(_get(ref), float(number), f"execution {number}")


def _teardown(name: str) -> None:
    """A graph that is torn down in the middle leaves its actors usable, and nothing behind."""
    with _peers(2) as (a, b):
        before = None
        for repeat in range(6):
            graph = _chain(name, a, "make_big", b, "slow").compile(depth=8)
            _get(graph.execute(0))
            for number in range(8):
                graph.execute(number)
            graph.teardown()
            if repeat == 2:
                before = _stable_holdings(a, b)
        assert before is not None
        _wait_for(
            lambda: _holdings(a, b) <= before, lambda: f"{_holdings(a, b)}, and {before} before"
        )


def _holdings(*peers: Any) -> list[tuple[int, int]]:
    return [tuple(_get(peer.holdings.remote())) for peer in peers]


def _stable_holdings(*peers: Any) -> list[tuple[int, int]]:
    """Count what the actors hold until the counts repeat: freeing things takes a moment."""
    last = _holdings(*peers)
    for _ in range(100):
        time.sleep(0.05)
        now = _holdings(*peers)
        if now == last:
            break
        last = now
    return last


def _wait_for(condition: Callable[[], bool], why: Callable[[], str]) -> None:
    end = time.monotonic() + 10
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(why())
        time.sleep(0.02)


def _death_of_the_writer(name: str) -> None:
    """A writer's death fails the executions that wait for its tensors; the other actors stay usable."""
    _death(name, lambda a, b: a)


def _death_of_a_reader(name: str) -> None:
    """A reader's death fails the executions that wait for its results; the other actors stay usable."""
    _death(name, lambda a, b: b)


def _death(name: str, who: Callable[[Any, Any], Any]) -> None:
    with (
        _mortal_peers(2) as (a, b),
        _compiled(_chain(name, a, "make_big", b, "slow"), depth=8) as graph,
    ):
        _get(graph.execute(1))
        refs = [graph.execute(number) for number in range(8)]
        conveyor.kill(who(a, b))
        # All executions together take so long that the last one cannot have ended before the kill.
        _expect_error(refs[-1], ActorDiedError)
        survivor = b if who(a, b) is a else a
        _get(survivor.holdings.remote())


def _restart(name: str) -> None:
    """A graph whose actor has been restarted goes on, with new endpoints."""
    with _mortal_peers(2, max_restarts=-1) as (a, b):
        root = _chain(name, a, "make_big", b, "total")
        with _compiled(root, depth=4) as graph:
            _get(graph.execute(1))
            for number, victim in enumerate((a, b)):
                _expect_error(victim.die.remote(), ActorDiedError)
                _wait_for(lambda: _goes_on(graph, number), lambda: "the graph does not go on")  # noqa: B023


def _goes_on(graph: Any, number: int) -> bool:
    try:
        got = _get(graph.execute(number))
    except ActorDiedError:
        graph.restart()
        return False
    return bool(got == (number, float(number), float(number)))


_CHECKS: tuple[Callable[[str], None], ...] = (
    _values,
    _many_under_way,
    _several_readers,
    _two_edges,
    _values_are_safe,
    _memory_is_used_again,
    _errors_are_values,
    _what_cannot_go,
    _teardown,
    _death_of_the_writer,
    _death_of_a_reader,
    _restart,
)


# Checks of transports of direct objects.

_numbers = itertools.count()


class _Trial(NamedTuple):
    """Arguments of a check: a transport by its registered name, sample values, and two actors."""

    name: str
    sample: Callable[[int], Any]
    equal: Callable[[Any, Any], bool]
    producer: Any
    user: Any

    def actor(self) -> Any:
        """Start another actor, for a check that kills it or counts the requests to its manager."""
        return conveyor.remote(_ManagerPeer).remote(self.name, self.sample)

    def assert_equal(self, came: Any, number: int, what: str) -> None:
        wanted = self.sample(number)
        assert self.equal(came, wanted), f"{what} is {came!r}, where {wanted!r} was sent"


def check_tensor_transport_manager(
    manager_class: type[TensorTransportManager],
    devices: Sequence[str] = ("cpu",),
    data_type: type | None = None,
    *,
    sample: Callable[[int], Any] | None = None,
    equal: Callable[[Any, Any], bool] | None = None,
) -> None:
    """Run all checks on a transport for direct objects, in the running session or a new one. The checks
    register the transport by a name of their own, so it need not be registered before. ::

        conveyor.testing.check_tensor_transport_manager(SharedMemoryTransport, ["cpu"])

    Args:
        manager_class: as for ``register_tensor_transport``.
        devices: likewise.
        data_type: likewise.
        sample: makes the object to move, a different one for each number; needed for a ``data_type`` other
            than torch tensors.
        equal: whether two such objects are equal; by default torch and numpy tell.

    Raises:
        AssertionError: some checks have failed; the message says which, and why.
    """
    if sample is None and data_type is not None and data_type.__module__ != "torch":
        raise ValueError("sample= is needed where other things than torch tensors are moved")
    name = f"checked-{os.getpid()}-{next(_numbers)}"
    register_tensor_transport(name, devices, _counted(manager_class), data_type)
    trial = _Trial(name, sample or _tensor, equal or _same, None, None)
    trial = trial._replace(producer=trial.actor(), user=trial.actor())
    failed = []
    for check in _MANAGER_CHECKS:
        try:
            check(trial)
        except Exception as error:
            failed.append(f"{check.__name__.strip('_')}: {type(error).__name__}: {error}")
    if failed:
        raise AssertionError(
            f"{manager_class.__name__} fails {len(failed)} checks:\n" + "\n".join(failed)
        )


def _tensor(number: int) -> Any:
    import torch

    return torch.full((3, number + 1), float(number))


def _same(one: Any, other: Any) -> bool:
    if hasattr(one, "shape"):
        return bool(one.shape == other.shape and (one == other).all())
    return bool(one == other)


class _Seen:
    """Requests that a manager has got in a process, and their faults."""

    def __init__(self) -> None:
        self.extracted: list[str] = []
        self.freed: list[str] = []
        self.wrong: list[str] = []
        self.changed = threading.Condition()


def _counted(manager_class: type[TensorTransportManager]) -> type[TensorTransportManager]:
    """Make a subclass of a manager's class that counts the requests."""

    class Counted(manager_class):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.checked = _Seen()

        def extract_tensor_transport_metadata(self, obj_id: str, tensors: list[Any]) -> Any:
            found = super().extract_tensor_transport_metadata(obj_id, tensors)
            with self.checked.changed:
                self.checked.extracted.append(obj_id)
                if not isinstance(found, TensorTransportMetadata):
                    self.checked.wrong.append(f"the metadata are a {type(found).__name__}")
                elif len(found.tensor_meta) != len(tensors):
                    self.checked.wrong.append(
                        f"the metadata are of {len(found.tensor_meta)} tensors, and there are {len(tensors)}"
                    )
            return found

        def garbage_collect(self, obj_id: str, *rest: Any, **named: Any) -> None:
            try:
                super().garbage_collect(obj_id, *rest, **named)
            except Exception as error:
                self.checked.wrong.append(f"garbage_collect: {error!r}")
                raise
            finally:
                with self.checked.changed:
                    self.checked.freed.append(obj_id)
                    self.checked.changed.notify_all()

    Counted.__name__ = manager_class.__name__
    return Counted


class _ManagerPeer:
    def __init__(self, name: str, sample: Callable[[int], Any]) -> None:
        self._name = name
        self._sample = sample

    def make(self, number: int) -> Any:
        made = self._sample(number)
        return {
            "one": made,
            "again": [made],
            "other": self._sample(number + 1),
            "text": "out_of_band",
        }

    def give_back(self, value: Any) -> Any:
        return value["one"], value["again"][0] is value["one"], value["other"]

    def busy(self, begun: Any, goes_on: Any) -> None:
        begun.send(None)
        goes_on.receive()

    def ready(self) -> None:
        """Return nothing. When it returns, the actor has done all calls that came before."""

    def counted(self, until: int) -> tuple[list[str], list[str], list[str]]:
        gc.collect()
        found = route(self._name)
        assert found is not None
        manager: Any = found.manager
        seen: _Seen = manager.checked
        with seen.changed:
            seen.changed.wait_for(lambda: len(seen.freed) >= until, _TIME_LIMIT)
            return list(seen.extracted), list(seen.freed), list(seen.wrong)


def _made(trial: _Trial, actor: Any, number: int) -> Any:
    ref = actor.make.options(tensor_transport=trial.name).remote(number)
    conveyor.wait([ref], timeout=_TIME_LIMIT)
    return ref


def _arrives(trial: _Trial) -> None:
    producer, user = trial.producer, trial.user
    ref = _made(trial, producer, 1)
    value = _get(ref)
    assert ref.route() == trial.name, f"it came by {ref.route()!r}: nothing was taken out of it"
    trial.assert_equal(value["one"], 1, "what the driver got")
    trial.assert_equal(value["other"], 2, "the second of what the driver got")
    assert value["again"][0] is value["one"], "what is in a value twice came as two"
    one, same, other = _get(user.give_back.remote(ref))
    trial.assert_equal(one, 1, "what an actor got")
    trial.assert_equal(other, 2, "the second of what an actor got")
    assert same, "what is in a value twice came to an actor as two"


def _is_of_the_driver(trial: _Trial) -> None:
    user = trial.user
    value = {"one": trial.sample(3), "again": [None], "other": None}
    ref = conveyor.put(value, tensor_transport=trial.name)
    one, _, _ = _get(user.give_back.remote(ref))
    trial.assert_equal(one, 3, "what the driver has put")


def _comes_again(trial: _Trial) -> None:
    producer = trial.producer
    ref = _made(trial, producer, 2)
    first, second = _get(ref), _get(ref)
    assert first["one"] is not second["one"], "two fetches gave one object"
    trial.assert_equal(first["one"], 2, "the first fetch")
    trial.assert_equal(second["one"], 2, "the second fetch")


def _comes_to_many_at_once(trial: _Trial) -> None:
    producer, users = trial.producer, [trial.user, trial.actor()]
    refs = [_made(trial, producer, i) for i in range(4)]
    calls = [user.give_back.remote(ref) for user in users for ref in refs]
    with ThreadPoolExecutor(4) as pool:
        for i, value in enumerate(pool.map(_get, refs)):
            trial.assert_equal(value["one"], i, f"value {i} of several at once")
    for i, (one, _, _) in enumerate(_get(calls)):
        trial.assert_equal(one, i % 4, f"value {i % 4} of several at once, at an actor")


def _needs_no_method_of_the_producer(trial: _Trial) -> None:
    producer = trial.producer
    ref = _made(trial, producer, 1)
    begun, begun_receiver = conveyor.channel.open()
    go_on, goes_on = conveyor.channel.open()
    held = producer.busy.remote(begun, goes_on)
    begun_receiver.receive(timeout=_TIME_LIMIT)
    try:
        value = _get(ref)
        assert not held.done()
    finally:
        go_on.send(None)
        _get(held)
    trial.assert_equal(value["one"], 1, "what a busy actor has")


def _lets_go(trial: _Trial) -> None:
    producer, user = trial.actor(), trial.user
    refs = [_made(trial, producer, i) for i in range(3)]
    _get([user.give_back.remote(ref) for ref in refs])
    extracted, freed, wrong = _get(producer.counted.remote(0))
    assert not freed, "a value was collected while there were references to it"
    refs.clear()
    gc.collect()
    extracted, freed, wrong = _get(producer.counted.remote(3))
    assert sorted(extracted) == sorted(freed), f"of {extracted} these were collected: {freed}"
    assert len(set(freed)) == 3, f"three values were called {freed}"
    assert not wrong, "; ".join(wrong)


def _outlives_the_producer(trial: _Trial) -> None:
    producer, user = trial.actor(), trial.user
    ref = _made(trial, producer, 1)
    conveyor.kill(producer)
    for failing in (ref, user.give_back.remote(ref)):
        try:
            _get(failing)
        except ActorDiedError:
            continue
        raise AssertionError("the value of a dead actor could be fetched")
    one, _, _ = _get(user.give_back.remote(_made(trial, trial.producer, 2)))
    trial.assert_equal(one, 2, "what came after an actor's death")


def _outlives_the_consumer(trial: _Trial) -> None:
    producer, user = trial.actor(), trial.actor()
    ref = _made(trial, producer, 1)
    _get(user.give_back.remote(ref))
    lost = user.give_back.remote(ref)
    conveyor.kill(user)
    conveyor.wait([lost], timeout=_TIME_LIMIT)
    trial.assert_equal(_get(ref)["one"], 1, "what came after a consumer's death")
    del ref, lost
    gc.collect()
    _, freed, _ = _get(producer.counted.remote(1))
    assert len(freed) == 1, "a value that a dead consumer had was not collected"


_MANAGER_CHECKS: tuple[Callable[[_Trial], None], ...] = (
    _arrives,
    _is_of_the_driver,
    _comes_again,
    _comes_to_many_at_once,
    _needs_no_method_of_the_producer,
    _lets_go,
    _outlives_the_producer,
    _outlives_the_consumer,
)
