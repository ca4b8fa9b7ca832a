"""Actors of tests on nodes that share no memory, on one machine: ``CONVEYOR_TEST_NODES=apart`` beside
``CONVEYOR_ENGINE=ray``.

Each of Ray's nodes counts as a host of its own, and actors that ask for no place are started on them in
turn, the first one away from the driver. So what a test has to say of several actors holds between hosts.
An actor that comes back may come back on the other node. `make test-nodes` runs the tests of what is the same
everywhere so.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

#: Whether tests are run so.
APART = os.environ.get("CONVEYOR_TEST_NODES") == "apart"
#: What the other node has, and what the driver's has. An actor takes so little of it that all find room.
_NODES = ("second", "first")
_SOME = 0.0001
#: What is not so between hosts, by docs/architecture/between-nodes.md or by how a test looks at it, and the
#: tests of it, by their file.
_DOING = "what an actor on another node does is not known before its node was asked"
_PROGRAM = "a program of its own, whose sessions are not spread"
_READS = "what a process reads itself is counted; tests/ray/test_ray_direct.py counts what its node fetches"
_MEMORY = "who writes over a ring has the memory of those on its own node only"
_COUNTED = "what actors on other nodes have counted goes with their graph (docs/limits.md)"
_IN_PLACE = "nothing is read in place that comes over the network (docs/limits.md)"
_CAPS = "a node at its cap asks nobody for memory when a frame comes (docs/architecture/between-nodes.md)"
_RAYS = "on Ray an actor has Ray's environment and log, on whatever node"
_LISTENS = (
    "a worker of Ray's listens itself; tests/ray/test_ray_transports.py has where transports do"
)
_SLEEPS = "what ranks of another node wait for is not seen from the driver's"
_LIVES = "an actor knows of one of another node only that it lives (docs/limits.md)"
_NOTED = (
    "of an actor of another node a trace has the first events, and none of a graph that has ended"
)
_NAMED = "an actor of another node is named with it; tests/ray/test_ray_observe.py has how"
_HALF = "ranks on several nodes are told at half of the grace period (docs/limits.md)"
_LATE = "what a writer says at its end may be on its way over the network when its reader ends"
LIMITS = {
    "test_actors": {
        "test_cwd_environment_and_path_are_the_drivers_of_the_moment": _RAYS,
        "test_output_reaches_the_driver_with_the_actors_name": _RAYS,
    },
    "test_broken_peers": {
        "test_a_ring_that_an_actor_reads": _MEMORY,
    },
    "test_collective_calls": {
        "test_a_rank_does_one_operation_of_a_group_at_a_time": _SLEEPS,
        "test_a_timeout_breaks_the_group_for_all": _LIVES,
    },
    "test_collective_calls_at_the_end": {
        "test_who_waits_in_a_circle_is_told_and_ends_in_order": _HALF,
        "test_a_circle_that_is_completed_when_the_end_has_begun": _HALF,
    },
    "test_direct_parts": {
        "test_narrow_parts_of_tall_arrays": _READS,
        "test_only_the_part_is_fetched": _READS,
        "test_parts_of_parts_of_containers": _READS,
    },
    "test_direct_passed_on": {
        "test_what_lies_in_its_makers_arena_is_read_there": _IN_PLACE,
    },
    "test_direct_ends": {
        "test_a_session_ends_while_a_value_is_let_go_of": _PROGRAM,
    },
    "test_dropped_results": {
        "test_dropped_in_an_actor": _CAPS,
        "test_dropped_in_an_actor_that_executes_the_graph": _CAPS,
        "test_dropped_results_make_room": _CAPS,
        "test_results_that_are_wanted_are_kept_and_told_of": _CAPS,
    },
    "test_failures": {
        "test_a_long_wait_is_logged_once": _DOING,
    },
    "test_fetching_transports": {
        "test_it_listens_on_loopback_only_and_no_longer_than_its_graph": _LISTENS,
    },
    "test_memory": {
        "test_what_one_process_has_free_is_there_for_another": _CAPS,
    },
    "test_stats": {
        "test_numbers_stay_after_teardown_and_can_be_exported": _COUNTED,
    },
    "test_trace": {
        "test_a_body_that_raises_or_tears_down": _NOTED,
        "test_a_long_trace_loses_nothing": _NOTED,
        "test_each_actor_is_a_process_with_its_pid": _NAMED,
    },
    "test_streams": {
        "test_streams_that_are_dropped_with_their_actors_process": _PROGRAM,
    },
    "test_transports": {
        "test_what_a_writer_says_at_its_end_comes_to_a_reader_that_was_busy": _LATE,
    },
}
#: Options of an actor that a test needs on the driver's node.
WITH_DRIVER: dict[str, Any] = {"resources": {_NODES[1]: _SOME}} if APART else {}
#: What has Ray place an actor itself.
_PLACED = ("resources", "scheduling_strategy", "label_selector")
#: s; connections are not to be lost because the machine has other work. A module says ``NODE_TIMEOUT`` where
#: its tests wait for a loss that is told only when a node's would have been.
NODE_TIMEOUT = 60.0


def of(module: Any) -> dict[str, Any]:
    """What a module's sessions start with."""
    return {"node_timeout": getattr(module, "NODE_TIMEOUT", NODE_TIMEOUT)} if APART else {}


def spread() -> None:
    """Have sessions of this process be so from now on."""
    from conveyor.engines.ray import engine, process_engine

    start, ray_options = engine.start, process_engine.ray_options
    call_lock = itertools.cycle(_NODES)

    @functools.wraps(start)
    def started(*args: Any, **options: Any) -> Any:
        nonlocal call_lock
        call_lock = itertools.cycle(_NODES)
        return start(*args, **{"shared_memory": "node", "node_timeout": NODE_TIMEOUT, **options})

    def placed(options: Any) -> Mapping[str, Any]:
        requested: dict[str, Any] = ray_options(options)
        if not any(name in requested for name in _PLACED):
            requested["resources"] = {next(call_lock): _SOME}
        return requested

    engine.start, process_engine.ray_options = started, placed


def skip_limits(items: Iterable[pytest.Item]) -> None:
    """Skip what does not hold between hosts."""
    for item in items:
        name = getattr(item, "originalname", item.name)
        reason = LIMITS.get(item.path.stem, {}).get(name)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=f"between hosts: {reason}"))
