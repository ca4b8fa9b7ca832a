"""Continuous batching of the language model's server, with stages that only count."""

import asyncio
import sys
from contextlib import aclosing
from pathlib import Path

import pytest
from integration_helpers import WAIT

import conveyor
from conveyor.dag import InputNode

sys.path.append(str(Path(__file__).parents[3] / "examples" / "llm"))

from engine import Engine, Part, Step

END = 7


@conveyor.remote
class CountingStage:
    """Knows of each sequence all of its tokens so far, as a cache of keys would; the last stage gives a token
    that depends on all of them."""

    def __init__(self, last):
        self.last = last
        self.tokens = {}
        self.sizes = []

    def forward(self, step, given=None):
        for sequence in step.ended:
            self.tokens.pop(sequence, None)
        self.sizes.append(len(step.parts))
        for part in step.parts:
            known = self.tokens.setdefault(part.sequence, [])
            assert len(known) == part.start
            if part.tokens == (13,):
                raise ValueError("an unlucky token")
            known.extend(part.tokens)
        if not self.last:
            return [len(self.tokens[part.sequence]) for part in step.parts]
        assert given == [len(self.tokens[part.sequence]) for part in step.parts]
        return [following(self.tokens[part.sequence]) for part in step.parts]

    def held(self):
        return len(self.tokens)

    def most(self):
        return max(self.sizes)


def following(tokens):
    return (31 * sum(tokens) + len(tokens)) % 101


def expected(prompt, limit):
    tokens, made = list(prompt), []
    while len(made) < limit:
        token = following(tokens)
        if token == END:
            break
        made.append(token)
        tokens.append(token)
    return made


@pytest.fixture
def stages(engine):
    return [CountingStage.remote(False), CountingStage.remote(True)]


@pytest.fixture
def graph(stages):
    with InputNode() as step:
        last = stages[1].forward.bind(step, stages[0].forward.bind(step))
    with last.compile(depth=3) as graph:
        yield graph


async def answer(engine, prompt, limit, most=None):
    made = []
    async with aclosing(engine.generate(prompt, limit, END)) as tokens:
        async for token in tokens:
            made.append(token)
            if len(made) == most:
                break
    return made


def test_requests_share_steps_and_each_gets_its_own_tokens(graph, stages):
    async def main():
        async with Engine(graph, in_flight=3, batch=4) as engine:
            prompts = [(i, i + 1, i * i % 11) for i in range(20)]
            made = await asyncio.gather(*[answer(engine, p, 5 + p[0]) for p in prompts])
            assert made == [expected(p, 5 + p[0]) for p in prompts]
            assert engine.running == 0
            assert await answer(engine, (1, 2), 3) == expected((1, 2), 3)
        assert await stages[0].held.remote() <= 1  # of the last ones nobody has been told
        assert 1 < await stages[0].most.remote() <= 4

    asyncio.run(asyncio.wait_for(main(), WAIT))


def test_a_token_that_ends_is_not_given(graph):
    prompt = next(
        (a, b)
        for a in range(101)
        for b in range(101)
        if expected((a, b), 9) == expected((a, b), 3)[:2]
    )

    async def main():
        async with Engine(graph, in_flight=3) as engine:
            assert await answer(engine, prompt, 9) == expected(prompt, 9)

    asyncio.run(asyncio.wait_for(main(), WAIT))


def test_who_goes_away_is_forgotten(graph, stages):
    async def main():
        async with Engine(graph, in_flight=3, batch=4) as engine:
            gone = [answer(engine, (i,), 1000, most=3) for i in range(10)]
            stays = answer(engine, (50, 51), 60)
            *some, all_of_it = await asyncio.gather(*gone, stays)
            assert [len(made) for made in some] == [3] * 10
            assert all_of_it == expected((50, 51), 60)
            assert engine.running == 0
            await answer(engine, (1,), 1)
        assert await stages[1].held.remote() <= 1

    asyncio.run(asyncio.wait_for(main(), WAIT))


def test_a_step_that_fails_fails_its_requests_only(graph, stages):
    async def main():
        async with Engine(graph, in_flight=3, batch=1) as engine:
            made = await asyncio.gather(
                answer(engine, (1, 2, 3), 8), answer(engine, (13,), 8), return_exceptions=True
            )
            assert made[0] == expected((1, 2, 3), 8)
            assert isinstance(made[1], ValueError)
            assert engine.running == 0
            assert await answer(engine, (4,), 8) == expected((4,), 8)
        assert await stages[0].held.remote() <= 1

    asyncio.run(asyncio.wait_for(main(), WAIT))


def test_a_step_is_plain_data():
    step = Step((Part(3, 2, (5, 6)),), (1,))
    assert step.parts[0].end == 4
    assert step == Step((Part(3, 2, (5, 6)),), (1,))
