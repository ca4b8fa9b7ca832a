"""A run over nodes: rounds, and between them nothing may be left, here or with the agents."""

from __future__ import annotations

import faulthandler
import gc
import os
import re
import sys
import time
import traceback
from collections import Counter
from random import Random
from typing import Any

import chaos_nodes
import chaos_nodes_round
import cloudpickle
import ray
from chaos_nodes import RAYS_SETTINGS, WINDOW, Nodes, ask
from chaos_nodes_round import NodesRound, WrongError

import conveyor
from conveyor.runtime import context

#: s for what goes on behind a round.
SOON = 30.0
#: Rounds in one session.
ROUNDS = 25


def run(seed: int, seconds: float, rounds: int | None, hang: float, replay: int = 0) -> int:
    """As ``chaos_run.run``. What a seed stands for depends on which actors are there: ``replay`` does it in a
    session of its own."""
    os.environ.update(RAYS_SETTINGS)
    for module in (chaos_nodes, chaos_nodes_round, sys.modules[__name__]):
        # Ray's processes do not find them.
        cloudpickle.register_pickle_by_value(module)
        ray.cloudpickle.register_pickle_by_value(module)
    end, draw = time.monotonic() + seconds, Random(seed)
    faults: Counter[str] = Counter()
    done, failed = 0, 0
    nodes = Nodes(2)
    good = True
    try:
        while time.monotonic() < end and done < (replay or rounds or 1 << 60) and good:
            conveyor.init(
                engine="ray", shared_memory="node", node_timeout=WINDOW, log_to_driver=False
            )
            nodes.members.clear()
            for _ in range(ROUNDS if not replay else 1):
                if time.monotonic() >= end or done >= (replay or rounds or 1 << 60):
                    break
                number = seed if replay else draw.randrange(1 << 48)
                faulthandler.dump_traceback_later(hang * 4, exit=True)
                rng = Random(number)
                nodes.fill(rng, rng.randint(2, 6))
                course = NodesRound(number, nodes)
                try:
                    course.run()
                    done += 1
                    failed += course.failed
                    faults.update(fault.kind for fault in course.faults)
                    _nothing_is_left(nodes)
                except BaseException:
                    traceback.print_exc()
                    print(course.describe(), file=sys.stderr)
                    good = False
                    break
                faulthandler.cancel_dump_traceback_later()
            faulthandler.dump_traceback_later(hang * 4, exit=True)
            conveyor.shutdown()
            faulthandler.cancel_dump_traceback_later()
    finally:
        nodes.close()
    print(f"{done} rounds over nodes, {failed} failures as they had to be; {dict(faults)}")
    print(f"wrong results, hangs, leaks: {'none' if good else 'SEE ABOVE'} (seed {seed})")
    return 0 if good else 1


def _kinds() -> Counter[str]:
    """Descriptors of this process that are not Ray's."""
    kinds: Counter[str] = Counter()
    for entry in os.listdir("/proc/self/fd"):
        try:
            what = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:  # the listing's own
            continue
        if re.search("memfd|pidfd", what):
            kinds[re.sub(r"\d+", "", what)] += 1
    return kinds


def _of_agent(its: Any) -> dict[str, Any]:
    station = its._station
    return {
        "expected": len(its._expected),
        "living": len(its._living),
        "locals": len(station._locals),
        "segments": len(station._segments),
        "memfds": sum(
            "memfd" in os.readlink(f"/proc/self/fd/{fd}")
            for fd in os.listdir("/proc/self/fd")
            if os.path.islink(f"/proc/self/fd/{fd}")
        ),
    }


def _state(nodes: Nodes) -> dict[str, Any]:
    driver = context.running()
    abroad = driver.abroad
    living = [member for member in nodes.members if not member.struck]
    elsewhere = [member for member in living if member.node is not nodes.own]
    state: dict[str, Any] = {
        "processes": (len(driver._hosts._living), len(living)),
        "proxies": (len(abroad._host_of), len(elsewhere)),
        "arenas": (len(abroad._arenas), len(elsewhere)),
        "links": (len(abroad._links), len(elsewhere)),
        "abroad": (len(driver._hosts._abroad), len(elsewhere)),
        "pidfds": (_kinds()["anon_inode:[pidfd]"], len(living) - len(elsewhere)),
    }
    for node in nodes.nodes:
        agent = nodes.agent_of(node)
        if agent is None or node.lost:
            continue
        of_agent = ask(agent, _of_agent)
        there = sum(member.node is node for member in elsewhere)
        for what in ("living", "locals"):
            state[f"{what} of {node.resource}"] = (of_agent[what], there)
        state[f"expected of {node.resource}"] = (of_agent["expected"], 0)
    return state


def _nothing_is_left(nodes: Nodes) -> None:
    """With no graph there is what the living have, and nothing else."""
    end = time.monotonic() + SOON
    while True:
        gc.collect()
        wrong = {what: pair for what, pair in _state(nodes).items() if pair[0] != pair[1]}
        if not wrong:
            return
        if time.monotonic() > end:
            raise WrongError(f"left (found, due): {wrong}")
        time.sleep(0.05)
