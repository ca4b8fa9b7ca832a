"""What is Ray's engine's alone; `make test-ray` runs it, beside what runs on all engines."""

import os

import pytest

import conveyor

if os.environ.get("CONVEYOR_ENGINE") != "ray":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def rt(leaves_nothing):
    """A session on Ray."""
    with leaves_nothing():
        conveyor.init()
        yield
        conveyor.shutdown()


@pytest.fixture(scope="module")
def far(two_nodes, leaves_nothing):
    """A session in which each of two nodes is a host of its own. Its connections are not to be lost because
    the machine has other work."""
    with leaves_nothing():
        conveyor.init(engine="ray", shared_memory="node", node_timeout=30)
        yield
        conveyor.shutdown()


@pytest.fixture(scope="module")
def stages(two_nodes):
    """Two actors of Ray's, on two nodes. What they have of one test they have of the next one's session."""
    from ray_guests_helpers import Stage

    return Stage.remote(), Stage.options(resources={"second": 0.1}).remote()


@pytest.fixture(autouse=True)
def _no_node_is_dead_and_not_known_to_be(two_nodes, wait_until):
    """Ray would place the next test's actors on a node that this one has taken away."""
    import ray

    yield
    if ray.is_initialized():
        there = {node.node_id for node in two_nodes.list_all_nodes()}
        wait_until(lambda: {node["NodeID"] for node in ray.nodes() if node["Alive"]} <= there)


@pytest.fixture
def stage(two_nodes):
    """One of a test's own."""
    import ray
    from ray_guests_helpers import Stage

    made = Stage.remote()
    yield made
    ray.kill(made)
