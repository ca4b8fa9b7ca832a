"""A part of ``make faults``: the phases whose calls fail quickly, and of the others one call in some."""

import pytest
from faults_control import ALLOCATIONS, SYSTEM_CALLS, build
from faults_plan import run_one


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    return build(tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize(
    ("phase", "where", "calls", "step"),
    [
        ("graph", "driver", ALLOCATIONS, 3),
        ("graph", "actor", ALLOCATIONS, 3),
        ("call", "driver", ALLOCATIONS, 5),
        ("call", "actor", ALLOCATIONS, 5),
        ("stream", "driver", ALLOCATIONS, 5),
        ("compile", "driver", SYSTEM_CALLS, 1),
        ("compile", "actor", SYSTEM_CALLS, 1),
        ("start", "driver", SYSTEM_CALLS, 15),
        ("restart", "newcomers", SYSTEM_CALLS, 9),
    ],
)
def test_no_fault_hangs_lies_or_leaks(environment, phase, where, calls, step):
    report = run_one(environment, phase, where, calls, step=step)
    assert not report["findings"], "\n".join(report["findings"])
    assert report["count"] > 0
