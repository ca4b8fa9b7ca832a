"""Channels, as a typed program writes them. What is `# wrong` must be seen to be."""

from __future__ import annotations

from typing import Any

from typing_extensions import assert_type

import conveyor
from conveyor.channel import Channel, ChannelStatistics, Receiver, Sender


@conveyor.remote
def total(numbers: Receiver[int]) -> int:
    return sum(numbers)


@conveyor.remote
async def total_later(numbers: Receiver[int]) -> int:
    return sum([number async for number in numbers])


async def coroutine(sender: Sender[int], receiver: Receiver[int]) -> None:
    await sender.send_async(1)
    await sender.send_async("one")  # wrong
    assert_type(await receiver.receive_async(), int)


def wrong(sender: Sender[int], receiver: Receiver[int]) -> None:
    sender.send("one")  # wrong
    sender.send(1, "soon")  # wrong
    for number in receiver:
        number.upper()  # wrong
    conveyor.channel.open[int](depth="8")  # wrong
    accepts(sender, receiver)
    refuses(sender, receiver)  # wrong


def accepts(sender: Sender[bool], receiver: Receiver[object]) -> None:
    sender.send(True)
    assert_type(receiver.receive(), object)


def refuses(sender: Sender[object], receiver: Receiver[object]) -> None:
    accepts(sender, receiver)


def main() -> None:
    sender, receiver = conveyor.channel.open[int](depth=4)
    assert_type(sender, Sender[int])
    assert_type(receiver, Receiver[int])
    with sender:
        sender.send(1)
        assert_type(sender.statistics(), ChannelStatistics)
    with receiver as same:
        assert_type(same, Receiver[int])
        assert_type(receiver.receive(timeout=1), int)
        assert_type(list(receiver), list[int])

    # A sender of more is one of less; what comes out is also something more general.
    channel: Channel[int] = conveyor.channel.open()
    assert_type(channel.sender, Sender[int])
    accepts(channel.sender, channel.receiver)

    anything: Channel[Any] = conveyor.channel.open()
    anything.sender.send(1)
    assert_type(anything.receiver.receive(), Any)

    there, here = conveyor.channel.open[int]()
    result = total.remote(here)
    there.send(1)
    there.close()
    assert_type(conveyor.get(result), int)
    conveyor.shutdown()


if __name__ == "__main__":
    main()
