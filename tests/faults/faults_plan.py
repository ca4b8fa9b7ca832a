"""Which phases there are, in which processes calls fail, and how one is run."""

import json
import os
import subprocess
import sys
from pathlib import Path

from faults_control import ALLOCATIONS, SYSTEM_CALLS, Control

import conveyor

#: Whose calls fail, beside the driver's: of an actor that is there (the first, or the other one), of the fork
#: server, or of all processes that are started meanwhile.
_REMOTE = {
    "graph": ("actor", "peer"),
    "call": ("actor", "peer"),
    "stream": ("actor",),
    "refs": ("actor", "peer"),
    "direct": ("actor", "peer"),
    "compile": ("actor", "peer"),
    "start": ("server", "newcomers"),
    "restart": ("peer", "server", "newcomers"),
    "session": ("newcomers",),
}

#: (phase, whose calls fail, which calls)
PLAN = [
    (phase, where, calls)
    for phase, is_remote in _REMOTE.items()
    for where in ("driver", *is_remote)
    for calls in (SYSTEM_CALLS, ALLOCATIONS)
    if (where, calls) != ("server", ALLOCATIONS)  # it has none of the core's
]
#: s; of one entry of the plan.
LIMIT = 1800


def run_one(environment, phase, where, calls, first=1, step=1, most=10**6):
    """The report of one entry of the plan."""
    here = Path(__file__).parent
    source = Path(conveyor.__file__).parents[1]
    env = {**os.environ, **environment, "PYTHONPATH": f"{source}:{here}", "PYTHONUNBUFFERED": "1"}
    program = [
        sys.executable,
        here / "faults_run.py",
        phase,
        where,
        str(calls),
        str(first),
        str(step),
        str(most),
    ]
    done = subprocess.run(
        program, env=env, stdout=subprocess.PIPE, text=True, timeout=LIMIT, check=False
    )
    lines = done.stdout.splitlines()
    report = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else None
    if report is None:
        calls_name = "system calls" if calls == SYSTEM_CALLS else "allocations"
        report = {
            "phase": phase,
            "where": where,
            "calls": calls_name,
            "count": 0,
            "errors": 0,
            "deaths": 0,
        }
        report["findings"] = []
    if done.returncode != 0:
        control = Control(environment["CONVEYOR_FAULTS"])
        failed = f"call {control.number}: {control.failed or 'none has failed yet'}"
        report["findings"].append(f"{failed}: the program ended with {done.returncode}")
    return report
