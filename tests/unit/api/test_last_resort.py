"""Log lines name the library where a program has not set up logging, and come once where it has."""

import subprocess
import sys

import pytest

LOGS = """
import logging, sys
import conveyor
conveyor.init('inline')
{setup}
logging.getLogger("conveyor").info("quiet")
logging.getLogger("conveyor").warning("waiting for %s", "x")
logging.getLogger("conveyor.direct").error("also")
"""


@pytest.mark.parametrize(
    ("setup", "told"),
    [
        ("", ["conveyor: waiting for x", "conveyor.direct: also"]),
        ("logging.basicConfig()", ["WARNING:conveyor:waiting for x", "ERROR:conveyor.direct:also"]),
        (
            "logging.getLogger('conveyor').addHandler(logging.StreamHandler())",
            ["waiting for x", "also"],
        ),
        (
            "logging.basicConfig(); logging.getLogger('conveyor').propagate = False",
            ["conveyor: waiting for x", "conveyor.direct: also"],
        ),
        ("logging.getLogger('conveyor').addHandler(logging.NullHandler())", []),
        ("sys.stderr = None", []),
    ],
)
def test_lines_name_the_library(setup, told):
    command = [sys.executable, "-c", LOGS.format(setup=setup)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == told
