"""How an attached actor's process leaves its session and goes on: the process was there before the
session."""

from __future__ import annotations

from conveyor.runtime import context, ending
from conveyor.runtime.uninterrupted import try_each
from conveyor.worker.control import Control
from conveyor.worker.runtime import ActorRuntime


def end_waits(runtime: ActorRuntime) -> None:
    """End all waits for things of the session here with the error that the session is over."""
    process = runtime.process
    process.ended = True  # before anybody looks again
    error = ending.error()
    for account in list(runtime.graphs):
        account.supervision.close(error)
    runtime.end_links()


def leave(runtime: ActorRuntime, control: Control) -> None:
    """Take all steps out of the session. Called by the thread that has taken the liveness futex, whose loop
    is over.

    References and values that are held stay; nothing new can come or go.
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
    """Announce the death of all other processes: the driver has died, and its actors die with it."""
    board, own = runtime.process.board, runtime.process.slot
    for slot in range(board.used):
        if slot != own and board.condition(slot) in (1, 2, 3):
            board.announce_death(slot)
    end_waits(runtime)
