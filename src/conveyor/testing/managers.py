"""Checks that every transport of direct objects must pass."""

from __future__ import annotations

import gc
import itertools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import conveyor
from conveyor.direct.managers.manager import TensorTransportManager, TensorTransportMetadata
from conveyor.direct.managers.registry import register_tensor_transport, route
from conveyor.exceptions import ActorDiedError

#: Timeout of each step of a check, in seconds.
_TIME_LIMIT = 60.0

_numbers = itertools.count()


class _Trial(NamedTuple):
    """Arguments of a check: a transport by its registered name, sample values, and two actors."""

    name: str
    sample: Callable[[int], Any]
    equal: Callable[[Any, Any], bool]
    maker: Any
    user: Any

    def actor(self) -> Any:
        """Start another actor, for a check that kills it or counts the requests to its manager."""
        return conveyor.remote(_Peer).remote(self.name, self.sample)

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
    trial = trial._replace(maker=trial.actor(), user=trial.actor())
    failed = []
    for check in _CHECKS:
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


class _Peer:
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


def _get(ref: Any) -> Any:
    return conveyor.get(ref, timeout=_TIME_LIMIT)


def _made(trial: _Trial, actor: Any, number: int) -> Any:
    ref = actor.make.options(tensor_transport=trial.name).remote(number)
    conveyor.wait([ref], timeout=_TIME_LIMIT)
    return ref


def _arrives(trial: _Trial) -> None:
    maker, user = trial.maker, trial.user
    ref = _made(trial, maker, 1)
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
    maker = trial.maker
    ref = _made(trial, maker, 2)
    first, second = _get(ref), _get(ref)
    assert first["one"] is not second["one"], "two fetches gave one object"
    trial.assert_equal(first["one"], 2, "the first fetch")
    trial.assert_equal(second["one"], 2, "the second fetch")


def _comes_to_many_at_once(trial: _Trial) -> None:
    maker, users = trial.maker, [trial.user, trial.actor()]
    refs = [_made(trial, maker, i) for i in range(4)]
    calls = [user.give_back.remote(ref) for user in users for ref in refs]
    with ThreadPoolExecutor(4) as pool:
        for i, value in enumerate(pool.map(_get, refs)):
            trial.assert_equal(value["one"], i, f"value {i} of several at once")
    for i, (one, _, _) in enumerate(_get(calls)):
        trial.assert_equal(one, i % 4, f"value {i % 4} of several at once, at an actor")


def _needs_no_method_of_the_producer(trial: _Trial) -> None:
    maker = trial.maker
    ref = _made(trial, maker, 1)
    begun, told = conveyor.channel.open()
    go_on, goes_on = conveyor.channel.open()
    held = maker.busy.remote(begun, goes_on)
    told.receive(timeout=_TIME_LIMIT)
    try:
        value = _get(ref)
        assert not held.done()
    finally:
        go_on.send(None)
        _get(held)
    trial.assert_equal(value["one"], 1, "what a busy actor has")


def _lets_go(trial: _Trial) -> None:
    maker, user = trial.actor(), trial.user
    refs = [_made(trial, maker, i) for i in range(3)]
    _get([user.give_back.remote(ref) for ref in refs])
    extracted, freed, wrong = _get(maker.counted.remote(0))
    assert not freed, "a value was collected while there were references to it"
    refs.clear()
    gc.collect()
    extracted, freed, wrong = _get(maker.counted.remote(3))
    assert sorted(extracted) == sorted(freed), f"of {extracted} these were collected: {freed}"
    assert len(set(freed)) == 3, f"three values were called {freed}"
    assert not wrong, "; ".join(wrong)


def _outlives_the_producer(trial: _Trial) -> None:
    maker, user = trial.actor(), trial.user
    ref = _made(trial, maker, 1)
    conveyor.kill(maker)
    for failing in (ref, user.give_back.remote(ref)):
        try:
            _get(failing)
        except ActorDiedError:
            continue
        raise AssertionError("the value of a dead actor could be fetched")
    one, _, _ = _get(user.give_back.remote(_made(trial, trial.maker, 2)))
    trial.assert_equal(one, 2, "what came after an actor's death")


def _outlives_the_consumer(trial: _Trial) -> None:
    maker, user = trial.actor(), trial.actor()
    ref = _made(trial, maker, 1)
    _get(user.give_back.remote(ref))
    lost = user.give_back.remote(ref)
    conveyor.kill(user)
    conveyor.wait([lost], timeout=_TIME_LIMIT)
    trial.assert_equal(_get(ref)["one"], 1, "what came after a consumer's death")
    del ref, lost
    gc.collect()
    _, freed, _ = _get(maker.counted.remote(1))
    assert len(freed) == 1, "a value that a dead consumer had was not collected"


_CHECKS: tuple[Callable[[_Trial], None], ...] = (
    _arrives,
    _is_of_the_driver,
    _comes_again,
    _comes_to_many_at_once,
    _needs_no_method_of_the_producer,
    _lets_go,
    _outlives_the_producer,
    _outlives_the_consumer,
)
