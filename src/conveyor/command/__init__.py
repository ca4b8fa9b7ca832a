"""The command `conveyor`: what a shell asks of running sessions, and of this system.

`conveyor status` (or `python -m conveyor status`) looks at them from outside: at the process table, which all
processes of a session map, and at the driver's list of graphs. Nobody is asked and nothing is written, so
it shows a session that hangs, or is stopped, as well as one that works. What is on other nodes a thread of
the driver asks those; where it does not answer, that is said.

`conveyor doctor` looks at the system, before there is a session.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from conveyor import __version__

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status. 1: what was asked for is not there, or may not be looked
    at."""
    parser = argparse.ArgumentParser(prog="conveyor", description="Look at sessions of Conveyor.")
    parser.add_argument("--version", action="version", version=f"conveyor {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    status = commands.add_parser(
        "status",
        help="what the processes of this machine's sessions are doing",
        description="What the processes of running sessions are doing, read from their shared memory: "
        "nobody is asked, so it works when they hang or are stopped. Of processes on other nodes the "
        "session's driver is asked. Sessions of other users, and those whose driver is on another host, are "
        "not seen.",
    )
    status.add_argument(
        "pid", nargs="?", type=int, help="of any process of the session that is meant"
    )
    status.add_argument("--json", action="store_true", help="for programs: a JSON list of sessions")
    status.add_argument(
        "--stacks", action="store_true", help="with each process's Python stack (py-spy)"
    )
    commands.add_parser(
        "doctor",
        help="what this system has, and what is slower or impossible on it",
        description="A line for each part of the system that sessions use: kernel, limits, memory, cores, "
        "packages. A mark says what is slower or impossible as it is.",
    )
    given = parser.parse_args(arguments)
    # Each of them imports what the other has no use for.
    try:
        if given.command == "doctor":
            from conveyor.command import doctor

            return doctor.show()
        from conveyor.command import status as sessions

        return sessions.show(given.pid, as_json=given.json, stacks=given.stacks)
    except BrokenPipeError:  # whoever read it has seen enough
        sys.stderr.close()
        return 0
