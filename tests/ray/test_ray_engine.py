"""Actors that Ray starts: where they are, what they find, and how they end."""

import contextlib
import multiprocessing
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import cloudpickle
import inside
import numpy as np
import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)
from ray_nodes import WAIT, get

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import ActorDiedError, ActorStartError, RuntimeStateError, WaitTimeoutError

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SECOND = {"resources": {"second": 1}}


@conveyor.remote
class Place:
    def __init__(self, folder=None):
        self.folder = folder

    def node(self):
        return ray.get_runtime_context().get_node_id()

    def pid(self):
        return os.getpid()

    def on_main_thread(self):
        return threading.current_thread() is threading.main_thread()

    def variable(self, name):
        return os.environ.get(name)

    def add(self, x, y=1):
        return x + y

    def total(self, x):
        return float(x.sum())

    def start_another(self):
        other = Place.options(resources={"first": 1}).remote()
        return conveyor.get(other.node.remote()), self.node()

    def make_nowhere(self):
        ref = conveyor.put(np.ones(200_000))
        here = Place.remote(ref)
        return Place.options(resources={"third": 1}).remote(ref), here.total.remote(ref)

    def rays_own(self, value):
        return ray.get(ray.put(value))

    def stay(self, path):
        open(path, "w").close()
        threading.Event().wait()

    def leave(self, how):
        how()

    def __del__(self):
        if self.folder is not None:
            open(os.path.join(self.folder, "deleted"), "w").close()


def test_placed_by_resources(rt):
    first = Place.options(resources={"first": 1}).remote()
    second = Place.options(**SECOND).remote()
    nodes = get([first.node.remote(), second.node.remote()])
    by_resource = {key: n["NodeID"] for n in ray.nodes() if n["Alive"] for key in n["Resources"]}
    assert nodes == [by_resource["first"], by_resource["second"]]


def test_placed_by_strategies(rt):
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    placed = [
        Place.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()
        for node in nodes
    ]
    assert get([actor.node.remote() for actor in placed]) == nodes
    group = placement_group([{"second": 1}])
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
    actor = Place.options(num_cpus=0, scheduling_strategy=strategy).remote()
    assert get(actor.node.remote()) in nodes
    conveyor.kill(actor)
    actor = Place.options(
        num_cpus=0, placement_group=group, placement_group_bundle_index=0
    ).remote()
    assert get(actor.node.remote()) in nodes
    conveyor.kill(actor)
    remove_placement_group(group)


def test_a_graph_over_two_nodes(rt):
    a, b = Place.options(resources={"first": 1}).remote(), Place.options(**SECOND).remote()
    with InputNode() as inp:
        dag = MultiOutputNode([b.add.bind(a.add.bind(inp)), a.add.bind(inp, y=10)])
    with dag.compile() as graph:
        for i in range(200):
            assert get(graph.execute(i)) == [i + 2, i + 10]
        big = np.ones(1 << 20)
        assert [part.sum() for part in get(graph.execute(big))] == [3 << 20, 11 << 20]


def test_methods_run_on_the_main_thread(rt):
    assert get(Place.remote().on_main_thread.remote())


def test_variables(rt):
    actor = Place.options(env_vars={"CONVEYOR_TEST_OWN": "yes"}).remote()
    assert get(actor.variable.remote("CONVEYOR_TEST_OWN")) == "yes"


def test_an_environment_of_rays(rt):
    actor = Place.options(
        runtime_env={"env_vars": {"A": "1"}, "config": {"setup_timeout_seconds": 60}}
    ).remote()
    assert get(actor.variable.remote("A")) == "1"


def test_variables_are_there_when_the_interpreter_starts(rt, tmp_path):
    (tmp_path / "only_with_this_path.py").write_text("found = 42")
    variables = {
        "PYTHONPATH": f"{tmp_path}:${{PYTHONPATH}}",
        "PYTHONHASHSEED": "7",
        "MALLOC_ARENA_MAX": "1",
        "CONVEYOR_TEST_OWN": "yes",
    }

    def started_with(_self):
        import only_with_this_path

        entries = Path("/proc/self/environ").read_text().split("\0")
        there = dict(entry.split("=", 1) for entry in entries if "=" in entry)
        both = all(there[name] == os.environ[name] for name in variables)
        return only_with_this_path.found, hash("a"), sys.flags.hash_randomization, both, there

    for options in ({"env_vars": variables}, {"runtime_env": {"env_vars": variables}, **SECOND}):
        actor = Place.options(**options).remote()
        found, hashed, randomized, both, there = get(actor.__ray_call__.remote(started_with))
        assert (found, randomized, both) == (42, 1, True)
        assert there["MALLOC_ARENA_MAX"] == "1"
        assert get(actor.__ray_call__.remote(lambda _: hash("a"))) == hashed
        told = subprocess.check_output(
            [sys.executable, "-c", "print(hash('a'))"], env={**os.environ, "PYTHONHASHSEED": "7"}
        )
        assert hashed == int(told)


def test_ray_is_there_inside(rt):
    assert get(Place.remote().rays_own.remote(42)) == 42


def test_what_there_is_is_what_ray_says(rt, stage):
    def told(_self=None):
        known = {node["NodeID"] for node in conveyor.nodes() if node["Alive"]}
        resources = conveyor.cluster_resources(), conveyor.available_resources()
        return known, *resources, conveyor.get_runtime_context().get_node_id()

    known = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    place = Place.options(**SECOND).remote()
    get(place.node.remote())
    for nodes, all_there_is, free, here in (told(), get(place.__ray_call__.remote(told))):
        assert nodes == known
        assert {"first", "second", "stage", "CPU"} <= all_there_is.keys()
        assert free["second"] <= all_there_is["second"]
        assert here in known
    assert get(place.__ray_call__.remote(told))[3] == get(place.node.remote())
    assert get(conveyor.attach(stage).__ray_call__.remote(told))[0] == known
    conveyor.shutdown()
    (alone,) = conveyor.nodes()  # nobody's session: this machine
    assert alone["NodeID"] == os.uname().nodename


def test_an_actor_places_others(rt):
    there, here = get(Place.options(**SECOND).remote().start_another.remote())
    assert there != here


def test_what_nobody_can_place_is_told_and_can_be_killed(rt, monkeypatch):
    from conveyor.engines.ray import process_engine as module

    monkeypatch.setattr(module, "_SAID_AFTER", 0.2)
    said = threading.Event()
    monkeypatch.setattr(module._log, "warning", lambda *_: said.set())
    nowhere = Place.options(resources={"third": 1}).remote()
    ref = nowhere.add.remote(1)
    assert said.wait(WAIT)

    with pytest.raises(WaitTimeoutError, match="Place is starting"):
        conveyor.get(ref, timeout=0.1)
    conveyor.kill(nowhere)
    with pytest.raises(ActorDiedError):
        get(ref)
    assert get(Place.remote().add.remote(1)) == 2  # and the session goes on


def test_an_actor_makes_others_of_its_own_references_and_waits_for_no_place(rt):
    maker = Place.remote()
    made, total = get(maker.make_nowhere.remote())  # though there is no such place
    with pytest.raises(WaitTimeoutError):
        conveyor.get(made.total.remote(np.ones(3)), timeout=0.1)
    conveyor.kill(made)
    assert get(total) == 200_000


def test_an_option_that_ray_does_not_take(rt):
    for kind, options, told in (
        (TypeError, {"placement_group": 3}, r"'Place.*placement_group=3: .*placement_group"),
        (
            ValueError,
            {"placement_group": "x"},
            r"'Place.*placement_group='x': AssertionError in Ray",
        ),
        (TypeError, {"placement_group_bundle_index": "x"}, r"'Place.*placement_group_bundle_index"),
        (TypeError, {"resources": {"first": "x"}}, r"'Place.*resources={'first': 'x'}: "),
        (ValueError, {"resources": {"first": -1}}, r"'Place.*negative"),
        (ValueError, {"scheduling_strategy": "x"}, r"'Place.*scheduling_strategy='x': Invalid"),
    ):
        with pytest.raises(kind, match=told):
            Place.options(**options).remote()
    assert get(Place.remote().add.remote(1)) == 2


# Ends


def test_killed_from_outside(rt, tmp_path, wait_until):
    actor, other = Place.remote(), Place.remote()
    pid = get(actor.pid.remote())
    ref = actor.stay.remote(str(tmp_path / "there"))
    wait_until(lambda: (tmp_path / "there").exists(), WAIT)
    begun = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    # The kernel tells it from Linux 6.15 on.
    with pytest.raises(ActorDiedError, match=r"SIGKILL|how cannot be known"):
        get(ref)
    assert time.monotonic() - begun < WAIT / 2
    assert get(other.add.remote(1)) == 2


def test_a_fatal_signal_is_told(rt):
    actor = Place.remote()
    with pytest.raises(ActorDiedError, match=r"signal 6 \(SIGABRT\)"):
        get(actor.leave.remote(lambda: os.abort()))


def test_left_by_sys_exit(rt):
    with pytest.raises(ActorDiedError, match=r"left by sys\.exit: it exited with code 7"):
        get(Place.remote().leave.remote(lambda: sys.exit(7)))


def test_it_ends_as_a_program_does(rt, tmp_path, wait_until):
    actor = Place.remote(str(tmp_path))
    get(actor.pid.remote())
    del actor
    wait_until((tmp_path / "deleted").exists, WAIT)


def test_started_again(rt):
    actor = Place.options(max_restarts=1).remote()
    pid = get(actor.pid.remote())
    os.kill(pid, signal.SIGKILL)

    def again():
        try:
            return get(actor.pid.remote())
        except ActorDiedError:
            return None

    end = time.monotonic() + WAIT
    while (found := again()) is None and time.monotonic() < end:
        pass
    assert found not in (None, pid)


def test_a_node_that_is_lost(rt, two_nodes, tmp_path, wait_until):
    node = two_nodes.add_node(num_cpus=1, resources={"lost": 1})
    actor = Place.options(resources={"lost": 1}).remote()
    stays = Place.options(resources={"first": 1}).remote()
    with InputNode() as inp:
        dag = stays.add.bind(actor.add.bind(inp))
    with dag.compile() as graph:
        assert get(graph.execute(1)) == 3
        ref = actor.stay.remote(str(tmp_path / "there"))
        wait_until((tmp_path / "there").exists, WAIT)
        two_nodes.remove_node(node, allow_graceful=False)
        with pytest.raises(ActorDiedError):
            get(ref)
        with pytest.raises(ActorDiedError):
            get(graph.execute(1))
        with pytest.raises(ActorDiedError):
            actor.add.remote(1)
    assert get(stays.add.remote(1)) == 2
    # Until Ray knows, it goes on placing actors there, which wait.
    wait_until(lambda: sum(known["Alive"] for known in ray.nodes()) == 2, 100)


def test_rays_kill_is_an_end_like_any_other(rt):
    actor = Place.remote()
    pid = get(actor.pid.remote())
    ref = actor.stay.remote(os.devnull)
    ray.kill(inside.rays_actor(pid))
    with pytest.raises(ActorDiedError):
        get(ref)


# The session


def test_the_page_that_shows_it(scripts, two_nodes):
    page = (Path(__file__).parents[2] / "docs/guide/ray-engine.md").read_text()
    programs = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(programs) == 3
    for program in programs[:2]:  # the third's addresses are of a network elsewhere
        said = re.findall(r"print\(.*\)  # (.*)", program)
        out = scripts.run(program, env={"RAY_ADDRESS": two_nodes.address}).split()
        assert out[-len(said) :] == said


def test_the_programs_own_connection_stays(two_nodes):
    conveyor.init()
    conveyor.shutdown()
    assert ray.is_initialized()


def test_an_environment_that_is_none(two_nodes):
    for given, told in ((3, "must be a dict, not int"), ({"env_vars": {"A": 3}}, "'A': 3")):
        with pytest.raises(TypeError, match=told):
            conveyor.init(engine="ray", runtime_env=given)
    assert not conveyor.is_initialized()


def test_a_forked_child_is_told_that_ray_does_not_work_there(two_nodes):
    receiver, sender = multiprocessing.get_context("fork").Pipe(duplex=False)

    def begin():
        for start in (lambda: conveyor.init(engine="ray"), lambda: conveyor.put(1)):
            try:
                start()
            except RuntimeStateError as error:
                sender.send(str(error))
        conveyor.init(engine="local")
        sender.send(str(conveyor.is_initialized()))
        conveyor.shutdown()

    child = multiprocessing.get_context("fork").Process(target=begin)
    child.start()
    try:
        for told in ("forked from one that was connected to Ray",) * 2 + ("True",):
            assert receiver.poll(WAIT), "the child hangs"
            assert told in receiver.recv()
        child.join(WAIT)
        assert child.exitcode == 0
    finally:
        child.kill()
        child.join()
        receiver.close()
        sender.close()


def test_a_child_forked_after_a_session_on_ray(scripts, two_nodes):
    scripts.run(
        """
        import os

        import ray
        import conveyor

        conveyor.init(engine="ray")
        conveyor.shutdown()
        assert not ray.is_initialized()
        pid = os.fork()
        if pid == 0:
            try:
                conveyor.init(engine="ray")
            except conveyor.exceptions.RuntimeStateError as error:
                os._exit(0 if "does not work in forked children" in str(error) else 1)
            os._exit(2)
        assert os.waitpid(pid, 0)[1] == 0
        """
    )


def test_a_program_of_its_own(scripts, two_nodes):
    """It connects, and ends that connection; its actors go with it when it is killed."""
    source = """
    import os, sys, time
    import conveyor, ray

    class A:
        def pid(self):
            return os.getpid()

    conveyor.init(engine="ray", address=sys.argv[1], namespace="mine", include_dashboard=False)
    actor = conveyor.remote(A).remote()
    print("said", conveyor.get(actor.pid.remote()), ray.get_runtime_context().namespace, flush=True)
    if sys.argv[2] == "stay":
        sys.stdin.close()
        time.sleep(600)
    conveyor.shutdown()
    assert not ray.is_initialized()
    """
    env = {"RAY_ADDRESS": ""}
    # Ray prints lines of its own.
    assert re.search(r"said \d+ mine", scripts.run(source, two_nodes.address, "end", env=env))
    program = scripts.start(source, two_nodes.address, "stay", env=env)
    pid = next(int(line.split()[1]) for line in program.stdout if line.startswith("said"))
    pidfd = os.pidfd_open(pid)
    program.kill()
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    assert poll.poll(1000 * WAIT)
    os.close(pidfd)


def test_an_address_where_nothing_is(scripts):
    out = scripts.run(
        """
        import conveyor
        try:
            conveyor.init(engine="ray", address="127.0.0.1:1")
        except ConnectionError as error:
            print("refused")
        for port in (0, 70000, 10**20):
            try:
                conveyor.init(engine="ray", address=f"127.0.0.1:{port}")
            except ValueError as error:
                assert f"there is no port {port}" in str(error), error
                print("no port")
        assert not conveyor.is_initialized()
        """,
        env={
            "RAY_ADDRESS": "",
            "RAY_gcs_rpc_server_connect_timeout_s": "1",
            "RAY_num_server_call_thread": "1",
        },
        timeout=100,
    )
    assert out.split("\n") == ["refused", "no port", "no port", "no port", ""]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (None, r"has said nothing for 0\.2 s"),
        (b"", "has closed the connection"),
        (b"HTTP/1.1 400 Bad Request\r\n", "speaks another protocol than Ray"),
    ],
    ids=["nothing", "the end", "something else"],
)
def test_an_address_where_something_else_listens(said, why, scripts):
    """Ray itself would wait for its words for ever."""
    source = """
    import sys
    import conveyor
    from conveyor.engines.ray import engine

    engine._CONNECT_SECONDS = 0.2 if sys.argv[2] == "silent" else 60
    try:
        conveyor.init(engine="ray", address=sys.argv[1])
    except ConnectionError as error:
        print(error)
    assert not conveyor.is_initialized()
    """
    with socket.create_server(("127.0.0.1", 0)) as listens:
        address = f"127.0.0.1:{listens.getsockname()[1]}"
        how = "silent" if said is None else "speaks"
        program = scripts.start(source, address, how, env={"RAY_ADDRESS": ""})
        caller, _ = listens.accept()
        with caller:
            if said is not None:
                caller.recv(1000)
                caller.sendall(said)
                with contextlib.suppress(OSError):  # it may have hung up at once
                    caller.shutdown(socket.SHUT_WR)
            out, _ = program.communicate(timeout=100)
    assert re.match(rf"there is no Ray cluster at {address}: what listens there {why}\.", out), out


def test_a_process_that_cannot_become_an_actor(rt, monkeypatch):
    """What Ray's process says of it is the error."""
    from conveyor.engines.ray import bootstrap

    monkeypatch.setattr(
        "conveyor.engines.ray.processes.version", lambda: "Conveyor 0.0 on Python 2"
    )
    with pytest.raises(ActorStartError, match=r"it is Conveyor .*, and the driver Conveyor 0\.0"):
        get(Place.remote().add.remote(1))
    monkeypatch.undo()
    assert bootstrap.version() != "Conveyor 0.0 on Python 2"
    assert get(Place.remote().add.remote(1)) == 2
