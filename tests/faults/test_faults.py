"""A part of ``make faults``: of each phase one call in some."""

import pytest
from faults_control import ALLOCATIONS, SYSTEM_CALLS, build
from faults_plan import run_one


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    return build(tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize(
    ("phase", "where", "calls", "step"),
    [
        ("graph", "driver", ALLOCATIONS, 5),
        ("call", "actor", ALLOCATIONS, 7),
        ("stream", "driver", ALLOCATIONS, 7),
        ("refs", "driver", SYSTEM_CALLS, 4),
        ("refs", "actor", ALLOCATIONS, 6),
        ("direct", "actor", ALLOCATIONS, 5),
        ("compile", "driver", ALLOCATIONS, 7),
        ("start", "driver", SYSTEM_CALLS, 25),
        ("start", "server", SYSTEM_CALLS, 4),
        ("restart", "newcomers", SYSTEM_CALLS, 12),
        ("session", "driver", SYSTEM_CALLS, 90),
    ],
)
def test_no_fault_hangs_lies_or_leaks(environment, phase, where, calls, step):
    report = run_one(environment, phase, where, calls, step=step)
    assert not report["findings"], "\n".join(report["findings"])
    assert report["count"] > 0


def test_a_session_that_has_no_memory_to_begin_with(environment):
    """What the core allocates first, so that nothing is half made and then forgotten."""
    report = run_one(environment, "session", "driver", ALLOCATIONS, most=10)
    assert not report["findings"], "\n".join(report["findings"])
    assert report["count"] == 10
