"""A maker of values in a process of its own, which a handmade program drives over a pipe."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.making import compute, fill, tensors
from benchmarks.model import Direct

Serve = Callable[[Direct, Connection, list[Any]], Callable[[], Any]]
"""Runs once in the maker, which has these tensors; what it returns runs for each ``RemoteMaker.ask``."""


def _main(spec: Direct, line: Connection, serve: Serve) -> None:
    made = tensors(spec)
    answer = serve(spec, line, made)
    while True:
        order, argument = line.recv()
        if order == "make":
            if not made:
                made += tensors(spec)
            fill(made, argument)
        if order != "ask":
            line.send(None)
        if order == "compute":
            compute(argument)
        elif order == "ask":
            answer()


class RemoteMaker:
    """A process that makes what ``spec`` says; ``serve`` is a function of a module."""

    def __init__(self, spec: Direct, serve: Serve) -> None:
        context = get_context("spawn")
        self.line, theirs = context.Pipe()
        self._process = context.Process(target=_main, args=(spec, theirs, serve), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def make(self, number: int) -> None:
        self._order("make", number)

    def compute(self, until: float) -> None:
        self._order("compute", until)

    def ask(self) -> None:
        """Have it answer, and do not wait for that."""
        self.line.send(("ask", None))

    def _order(self, order: str, argument: Any) -> None:
        self.line.send((order, argument))
        self.line.recv()

    def close(self) -> None:
        self._process.kill()
        self._process.join()
