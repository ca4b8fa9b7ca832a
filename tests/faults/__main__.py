"""Fail every system call and every allocation of the native core in turn: ``make faults``.

python tests/faults [--phase NAME]... [--where driver|actor|peer|server|newcomers]
    [--first N] [--step N] [--most N]
"""

import argparse
import sys
import tempfile

from faults_control import build
from faults_plan import PLAN, run_one


def line(report):
    what = f"{report['phase']:8} {report['where']:9} {report['calls']:12}"
    came = ", ".join(f"{report[name]} {name}" for name in ("errors", "deaths"))
    return f"{what}: {report['count']:4} calls failed, {came}, {len(report['findings'])} findings"


def main():
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--phase", action="append", help="only this one (repeat)")
    parser.add_argument("--where", help="only in these processes")
    parser.add_argument("--calls", type=int, help="1: system calls only, 2: allocations only")
    parser.add_argument(
        "--first", type=int, default=1, help="of each: the first call that is failed"
    )
    parser.add_argument("--step", type=int, default=1, help="fail every N-th call only")
    parser.add_argument(
        "--most", type=int, default=10**6, help="of each: the last call that is failed"
    )
    options = parser.parse_args()
    found = 0
    with tempfile.TemporaryDirectory() as folder:
        environment = build(folder)
        for phase, where, calls in PLAN:
            if options.phase and phase not in options.phase:
                continue
            if options.where not in (None, where) or options.calls not in (None, calls):
                continue
            numbers = options.first, options.step, options.most
            report = run_one(environment, phase, where, calls, *numbers)
            print(line(report), flush=True)
            if not report["count"]:  # it has ended before it could say so itself
                print(*report["findings"], sep="\n", flush=True)
            found += len(report["findings"])
    print(f"{found} findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
