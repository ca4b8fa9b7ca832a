"""Hosts in network namespaces; `make test-netns` runs it where these are allowed."""

import contextlib
import os
import re

import pytest

import conveyor

if os.environ.get("CONVEYOR_TEST_NETNS") != "1":
    collect_ignore_glob = ["test_*.py"]
else:
    import wire

    _REFUSAL = wire.refusal()

    def pytest_collection_modifyitems(items):
        for item in items:
            if _REFUSAL and "/netns/" in str(item.path):
                item.add_marker(pytest.mark.skip(reason=_REFUSAL))


@pytest.fixture(scope="session")
def cluster():
    """Three hosts, this process at the first, and Ray connected."""
    from hosts import hosts

    with hosts(3) as there:
        there.connect()
        yield there


@pytest.fixture
def session(cluster, wait_until):
    """Starts a session, whose end leaves no process of it on either host once the cables are whole."""

    @contextlib.contextmanager
    def start(node_timeout, **options):
        conveyor.init(engine="ray", node_timeout=node_timeout, **options)
        try:
            yield
        finally:
            conveyor.shutdown()

    yield start
    for cable in cluster.wires:
        cable.set()
        cable.heal()
    conveyor.shutdown()
    for space in cluster.spaces:
        wait_until(lambda space=space: not _of_sessions(space), 120, "the end of its processes")


def _of_sessions(space):
    """The pids of what a session has in that namespace: by the names that Ray gives to actors."""
    found = []
    for pid in space.pids():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
            name = file.read().decode(errors="replace")
            if re.match(r"ray::(\w+\.run|Agent)", name):
                found.append((pid, name))
    return found
