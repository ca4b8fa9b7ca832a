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
