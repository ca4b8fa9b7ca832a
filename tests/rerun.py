"""Run pytest, and what fails in it once more by itself.

Usage: ``python tests/rerun.py [--flaky FILE] [arguments for pytest]``, and at the end of a suite
``python tests/rerun.py --summary [--flaky FILE]``.

A test that fails, and passes when it is run again, is flaky: it is written to FILE (``build/flaky.txt``), and
the run passes. The summary names the flaky tests of all runs, and fails if they are more than three. The
second run is in one process, without what ran beside it in the first.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

#: More flaky tests than this fail a suite.
MOST_FLAKY = 3
#: More failures than this are no accident, and are not run again.
MOST_AGAIN = 20

# pytest's exit statuses
PASSED, FAILED, NO_TESTS = 0, 1, 5


def without_workers(args: list[str]) -> list[str]:
    """Leave out the options of pytest-xdist: what is run again is run in one process."""
    left, rest = [], iter(args)
    for arg in rest:
        if arg in ("-n", "--dist"):
            next(rest, None)
        elif not arg.startswith(("--dist=", "--numprocesses=")):
            left.append(arg)
    return left


def failures(cache: Path) -> set[str]:
    """The ids of the tests that failed last, as pytest's cache has them."""
    path = cache / "v" / "cache" / "lastfailed"
    return set(json.loads(path.read_text())) if path.exists() else set()


def run(args: list[str], flaky: Path) -> int:
    """Run pytest with ``args``, once more where tests fail, and return the exit status."""
    cache = Path(tempfile.mkdtemp(prefix="conveyor-pytest-cache-"))
    command = [sys.executable, "-m", "pytest", "-o", f"cache_dir={cache}"]
    try:
        status = subprocess.call([*command, *args])
        if status in (PASSED, NO_TESTS):
            return PASSED
        failed = failures(cache)
        # What is no test could not be collected, and keeps others from being run.
        collected = all("::" in test for test in failed)
        if status != FAILED or not collected or not 0 < len(failed) <= MOST_AGAIN:
            return status
        print(f"\n{len(failed)} failed; once more, each by itself:", flush=True)
        again = subprocess.call([*command, *without_workers(args), "--last-failed"])
        if again not in (PASSED, FAILED):
            return again
        flaky.parent.mkdir(parents=True, exist_ok=True)
        with flaky.open("a") as file:
            engine = os.environ.get("CONVEYOR_ENGINE", "")
            for test in sorted(failed - failures(cache)):
                file.write(f"{test} (engine {engine})\n" if engine else f"{test}\n")
        return again
    finally:
        shutil.rmtree(cache, ignore_errors=True)


def summary(flaky: Path) -> int:
    """Name the flaky tests, and return whether they are too many as an exit status."""
    tests = flaky.read_text().splitlines() if flaky.exists() else []
    for test in tests:
        print(f"flaky: {test}")
    if len(tests) > MOST_FLAKY:
        print(f"{len(tests)} flaky tests, where at most {MOST_FLAKY} are let pass")
    return FAILED if len(tests) > MOST_FLAKY else PASSED


def main() -> int:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--flaky", type=Path, default=Path("build/flaky.txt"))
    parser.add_argument("--summary", action="store_true")
    known, args = parser.parse_known_args()
    return summary(known.flaky) if known.summary else run(args, known.flaky)


if __name__ == "__main__":
    sys.exit(main())
