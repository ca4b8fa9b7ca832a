"""Calls outside the plain execute-and-get: eager calls, and asyncio."""

from __future__ import annotations

import asyncio
import time

from benchmarks.measure.bench import Bench, Figures, run_for, sampled, spread
from benchmarks.measure.execution import HOT_MOST, HOT_SECONDS, VALUE, WARM_MOST, WARM_SECONDS
from benchmarks.model import AsyncEcho, EagerCall


def eager(bench: Bench, _: EagerCall) -> Figures:
    path = bench.system.call_path("echo")
    try:
        run_for(WARM_SECONDS, 20, WARM_MOST, lambda: path.once(VALUE))
        if path.once(VALUE) != VALUE:
            raise ValueError("wrong result")
        return sampled(
            bench, path, path.once, VALUE, HOT_SECONDS * bench.effort, HOT_MOST, at_least=40
        )
    finally:
        path.close()


def async_echo(bench: Bench, _: AsyncEcho) -> Figures:
    return asyncio.run(_async_echo(bench))


async def _async_echo(bench: Bench) -> Figures:
    path = await bench.system.async_path()
    once, clock = path.once, time.perf_counter_ns
    try:
        warm_end = clock() + int(WARM_SECONDS * 1e9)
        for done in range(WARM_MOST):
            if done > 20 and clock() > warm_end:
                break
            if await once(VALUE) != VALUE:
                raise ValueError("wrong result")
        times: list[int] = []
        end = clock() + int(HOT_SECONDS * bench.effort * 1e9)
        with bench.cpu() as cpu:
            while len(times) < 40 or (len(times) < HOT_MOST and clock() < end):
                start = clock()
                await once(VALUE)
                times.append(clock() - start)
        figures = spread(times)
        figures["cpu_us"] = cpu.seconds / len(times) * 1e6
        return figures
    finally:
        path.close()
