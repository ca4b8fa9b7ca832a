"""The same with decorated classes, which pyright follows and mypy does not."""

from __future__ import annotations

from typing_extensions import assert_type

import conveyor
from conveyor import ActorHandle, ObjectRef


@conveyor.actor
class Counter:
    def __init__(self, start: int = 0) -> None:
        self.count = start

    @conveyor.method
    def add(self, step: int) -> int:
        self.count += step
        return self.count


@conveyor.actor(num_cpus=1)
class Named:
    @conveyor.method
    def name(self) -> str:
        return "x"


@conveyor.remote
class Plain:
    def double(self, x: int) -> int:
        return 2 * x


def main() -> None:
    counter = Counter.remote(start=1)
    assert_type(counter.add.remote(3), ObjectRef[int])
    assert counter.add.remote(3).get() == 7
    assert_type(Named.options(name="named").remote().name.remote().get(), str)
    plain = Plain.remote()
    assert isinstance(plain, ActorHandle)
    assert conveyor.get(plain.double.remote(2)) == 4


def seen_by_the_checker() -> None:
    Counter.remote("a")  # wrong
    Counter.remote().add.remote("a")  # wrong
    Counter.remote().subtract.remote("a")  # wrong
    Named.remote().name.remote().get().bit_length()  # wrong


if __name__ == "__main__":
    main()
