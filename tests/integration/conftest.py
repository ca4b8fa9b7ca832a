"""Sessions of one engine or the other."""

import os

import nodes_apart
import pytest

import conveyor

# With CONVEYOR_ENGINE=ray what runs on all engines runs on that one (see `make test-ray`).
_ENGINES = ["ray"] if os.environ.get("CONVEYOR_ENGINE") == "ray" else ["local", "inline"]


@pytest.fixture(params=_ENGINES)
def engine(request, leaves_nothing):
    """A session on each engine; its name."""
    with leaves_nothing():
        conveyor.init(engine=request.param)
        yield request.param
        conveyor.shutdown()


@pytest.fixture
def local(leaves_nothing):
    """A session on the local engine. With actors on nodes apart, which have all of it but what is skipped
    by name, on Ray."""
    with leaves_nothing():
        conveyor.init(engine="ray" if nodes_apart.APART else "local")
        yield
        conveyor.shutdown()
