"""A process leaves its session, and goes on: one that was there before the session, and is not its own."""

from __future__ import annotations

from conveyor.runtime import context, ending
from conveyor.runtime.actor.control import Control
from conveyor.runtime.actor.runtime import ActorRuntime
from conveyor.runtime.uninterrupted import try_each


def end_waits(runtime: ActorRuntime) -> None:
    """Who waits here for something of the session gets the error that it is over."""
    process = runtime.process
    process.ended = True  # before anybody looks again
    error = ending.error()
    for account in list(runtime.graphs):
        account.supervision.close(error)
    runtime.end_links()


def leave(runtime: ActorRuntime, control: Control) -> None:
    """Take all steps out. By the thread that has taken the life word, whose loop is over.

    Values that are held stay; nothing new can come or go.
    """
    process = runtime.process
    process.loop_over = True  # who waits for a call of the actor itself looks again
    end_waits(runtime)
    try_each(
        control.close,
        control.hang_up,
        runtime.pump.close,
        process.sweeper.close,
        process.keeping.close,
        runtime.exports.close,
        lambda: process.far_memory.close() if process.far_memory is not None else None,
        runtime.watcher.close,
        runtime.requests.close,
    )
    if context.running() is runtime:
        context.install(None)
    try_each(lambda: process.board.retire(process.slot), process.close)


def everybody_is_gone(runtime: ActorRuntime) -> None:
    """The driver has died, and nobody announces deaths any more: its actors die with it."""
    board, own = runtime.process.board, runtime.process.slot
    for slot in range(board.used):
        if slot != own and board.condition(slot) in (1, 2, 3):
            board.announce_death(slot)
    end_waits(runtime)
