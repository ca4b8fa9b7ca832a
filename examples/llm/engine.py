"""Continuous batching over a compiled graph: requests join and leave between two steps.

The engine needs a graph that takes a :class:`Step` and gives the next token of each of its sequences, and
nothing else of a model. As many steps are on their way as the pipeline has stages, and one more. A sequence
takes part in one of them at a time, since its next token depends on the last; so while one group of sequences
is in the second stage, another is in the first.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Part:
    """What one sequence adds in a step.

    start: how many of its tokens were computed before.
    tokens: the whole prompt at first, then one token.
    """

    sequence: int
    start: int
    tokens: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class Step:
    """One execution of the graph.

    ended: sequences that will take part no more.
    """

    parts: tuple[Part, ...]
    ended: tuple[int, ...] = ()


@dataclass(eq=False)
class Request:
    """A sequence that is being made, as the engine sees it."""

    sequence: int
    prompt: tuple[int, ...]
    limit: int
    end: int
    made: asyncio.Queue[int | BaseException | None] = field(default_factory=asyncio.Queue)
    count: int = 0
    computed: int = 0
    next: tuple[int, ...] = ()
    over: bool = False


class Engine:
    """Runs on one event loop, inside ``async with``."""

    def __init__(self, graph: Any, *, in_flight: int, batch: int = 16) -> None:
        """``in_flight``: steps that may be on their way; ``batch``: sequences in one of them, at most."""
        self._graph = graph
        self._in_flight = in_flight
        self._batch = batch
        self._numbers = itertools.count()
        #: Those that wait for a step, in the order in which they came or came back.
        self._ready: list[Request] = []
        self._ended: list[int] = []
        self._steps: set[asyncio.Task[None]] = set()
        #: Sequences that are there, waiting or in a step.
        self.running = 0

    async def __aenter__(self) -> Engine:
        return self

    async def __aexit__(self, *_: object) -> None:
        for step in list(self._steps):
            step.cancel()
        for step in list(self._steps):
            with suppress(asyncio.CancelledError):
                await step

    async def generate(self, prompt: Sequence[int], limit: int, end: int) -> AsyncIterator[int]:
        """The tokens that follow ``prompt``, as they come, at most ``limit``, and none behind ``end``.
        Whoever closes the iterator has the sequence forgotten."""
        request = Request(next(self._numbers), tuple(prompt), limit, end)
        request.next = request.prompt
        self.running += 1
        self._ready.append(request)
        self._submit()
        try:
            while (token := await request.made.get()) is not None:
                if isinstance(token, BaseException):
                    raise token
                yield token
        finally:
            self._end(request)

    def _submit(self) -> None:
        """Begin steps, as long as there is somebody for them and room."""
        while self._ready and len(self._steps) < self._in_flight:
            # Shared out over the steps that fit, or the first one would take all and the stages take turns.
            most = min(self._batch, -(-self.running // self._in_flight))
            batch, self._ready = self._ready[:most], self._ready[most:]
            parts = tuple(Part(r.sequence, r.computed, r.next) for r in batch)
            ended, self._ended = tuple(self._ended), []
            step = asyncio.ensure_future(self._run(Step(parts, ended), batch))
            self._steps.add(step)
            step.add_done_callback(self._stepped)

    def _stepped(self, step: asyncio.Task[None]) -> None:
        self._steps.discard(step)
        if not step.cancelled():
            self._submit()

    async def _run(self, step: Step, batch: list[Request]) -> None:
        try:
            tokens = await (await self._graph.execute_async(step))
        except Exception as error:  # each of them is told; the next ones are not affected
            self._ended += step.ended  # a stage may not have come to it
            for request in batch:
                self._ended.append(request.sequence)
                request.made.put_nowait(error)
                if not request.over:
                    self._forget(request)
            return
        for request, token in zip(batch, tokens, strict=True):
            request.computed += len(request.next)
            request.next = (token,)
            if request.over:
                self._ended.append(request.sequence)
                continue
            request.count += 1
            last = token == request.end
            if not last:
                request.made.put_nowait(token)
            if last or request.count >= request.limit:
                request.made.put_nowait(None)
                self._forget(request)
                self._ended.append(request.sequence)
            else:
                self._ready.append(request)

    def _end(self, request: Request) -> None:
        """Nobody wants more of it: it has been made, or its client is gone."""
        if request.over:
            return
        self._forget(request)
        if request in self._ready:  # else its step tells
            self._ready.remove(request)
            self._ended.append(request.sequence)

    def _forget(self, request: Request) -> None:
        request.over = True
        self.running -= 1
