"""Sessions of one engine or the other."""

import pytest

import conveyor


@pytest.fixture(params=["local", "inline"])
def engine(request, leaves_nothing):
    """A session on each engine; its name."""
    with leaves_nothing():
        conveyor.init(engine=request.param)
        yield request.param
        conveyor.shutdown()


@pytest.fixture
def local(leaves_nothing):
    """A session on the local engine."""
    with leaves_nothing():
        conveyor.init(engine="local")
        yield
        conveyor.shutdown()
