"""What a Plan reads like."""

from __future__ import annotations

import inspect
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

from conveyor.config import Config
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.dag.methods import bind
from conveyor.plan import explain, lower
from conveyor.plan.model import EXECUTOR

Pair = namedtuple("Pair", "left right")


@dataclass(frozen=True)
class Actor:
    index: int
    name: str


ENCODER, LEFT, RIGHT = Actor(0, "encoder"), Actor(1, "scorer"), Actor(2, "scorer")


def call(actor: Actor, method: str, *args: Any, n: int = 1, **kwargs: Any) -> Any:
    return bind(actor, method, args, kwargs, num_returns=n)


def text(root: Any, **options: Any) -> str:
    return explain(lower(root, Config(**options)))


def test_all_of_it():
    inp = InputNode()
    x = call(ENCODER, "encode", inp[1], mode="fast")
    left, right, _ = call(ENCODER, "split", x, n=3)
    y = call(LEFT, "score", [left, inp.weight])
    z = call(RIGHT, "score", right, bias=inp.weight)
    assert text(MultiOutputNode([y, call(RIGHT, "score", z), x])) == inspect.cleandoc(
        """
        3 actors, 5 tasks, 7 edges; up to 16 executions on the way
        execute(input[0] (unused), input[1], weight=) → [scorer[1].score, scorer[2].score#2, encoder.encode]

        driver
          1  send  input[1]           → encoder
          2  send  input['weight']    → scorer[1], scorer[2]
          3  recv  scorer[1].score    ← scorer[1]
          4  recv  scorer[2].score#2  ← scorer[2]
          5  recv  encoder.encode     ← encoder

        encoder
          1  recv  input[1]          ← driver
          2  call  encoder.encode(input[1], mode='fast')
          3  send  encoder.encode    → driver
          4  call  encoder.split(encoder.encode)  ([2] unused)
          5  send  encoder.split[0]  → scorer[1]
          6  send  encoder.split[1]  → scorer[2]

        scorer[1]
          1  recv  input['weight']   ← driver
          2  recv  encoder.split[0]  ← encoder
          3  call  scorer[1].score([encoder.split[0], input['weight']])
          4  send  scorer[1].score   → driver

        scorer[2]
          1  recv  input['weight']    ← driver
          2  recv  encoder.split[1]   ← encoder
          3  call  scorer[2].score(encoder.split[1], bias=input['weight'])
          4  call  scorer[2].score#2(scorer[2].score)
          5  send  scorer[2].score#2  → driver

        edges
          #0  input[1]           driver → encoder               shm, depth 16: same host
          #1  input['weight']    driver → scorer[1], scorer[2]  shm, depth 16: same host
          #2  encoder.encode     encoder → driver               shm, depth 16: same host
          #3  encoder.split[0]   encoder → scorer[1]            shm, depth 16: same host
          #4  encoder.split[1]   encoder → scorer[2]            shm, depth 16: same host
          #5  scorer[1].score    scorer[1] → driver             shm, depth 16: same host
          #6  scorer[2].score#2  scorer[2] → driver             shm, depth 16: same host
        """
    )


def test_one_of_each():
    assert text(call(ENCODER, "echo", InputNode()), depth=1).startswith(
        "1 actor, 1 task, 2 edges; up to 1 execution on the way\nexecute(input) → encoder.echo\n"
    )


def test_constants_are_short_and_on_one_line():
    class Matrix:
        def __repr__(self) -> str:
            return "[[1, 2],\n [3, 4]]" * 100

    class Broken:
        def __repr__(self) -> str:
            raise ValueError

    inp = InputNode()
    root = call(
        ENCODER,
        "f",
        [inp, *range(100)],
        "x" * 10_000,
        Matrix(),
        Broken(),
        (inp,),
        Pair(inp, Matrix()),
        k={"in": inp, "rest": [1, 2]},
    )
    plan = text(root)
    assert all(len(line) < 300 for line in plan.splitlines())
    assert "[input, 0, 1, 2, 3, ...]" in plan
    assert "(input,)" in plan
    assert "Pair(input, [[1, 2], [" in plan
    assert "k={'in': input, 'rest': [1, 2]}" in plan


def test_what_stays_on_its_actor_says_so_between_nodes_as_well():
    made = bind(ENCODER, "encode", (InputNode(),), {}, by_reference=("auto", False))
    plan = lower(made, Config())
    stays = "it stays on its actor until it is fetched"
    assert f"shm, depth 16: {stays}" in explain(plan)
    spread = explain(plan, hosts={EXECUTOR: "the driver's node", 0: "another"})
    assert f"network link, depth 16: from another to the driver's node; {stays}" in spread
    assert spread.count(stays) == 1
