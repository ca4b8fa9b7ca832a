"""``python tests/netns``: 100,000 executions and five minutes over a bad network. See ``--help``."""

from __future__ import annotations

import argparse
import sys

import wire
from hosts import hosts
from weather_run import run

import conveyor


def main() -> int:
    parser = argparse.ArgumentParser(prog="netns", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300, help="at least so long (300)")
    parser.add_argument("--executions", type=float, default=1e5, help="at least so many (1e5)")
    parser.add_argument("--jitter", type=float, default=0.05, help="seconds, each way (0.05)")
    parser.add_argument("--loss", type=float, default=0.01, help="of packets, each way (0.01)")
    parser.add_argument("--reset", type=float, default=10, help="seconds between two resets (10)")
    parser.add_argument("--in-flight", type=int, default=64, help="executions at a time (64)")
    parser.add_argument("--node-timeout", type=float, default=1, help="of the session (1)")
    options = parser.parse_args()
    if refusal := wire.refusal():
        print(f"skipped: {refusal}")
        return 0
    with hosts(2) as there:
        there.connect()
        conveyor.init(engine="ray", node_timeout=options.node_timeout)
        try:
            report = run(
                there,
                options.seconds,
                int(options.executions),
                jitter=options.jitter,
                loss=options.loss,
                reset=options.reset,
                in_flight=options.in_flight,
            )
        finally:
            conveyor.shutdown()
        print(f"the network is a {there.kind}")
    print("\n".join(report.lines()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
