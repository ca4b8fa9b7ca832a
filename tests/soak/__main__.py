"""``python tests/soak``: a million executions, after which all is as it was before. See ``--help``."""

from __future__ import annotations

import argparse
import importlib.util
import sys

from soak_run import judge, soak


def main() -> int:
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--executions", type=float, default=1e6, help="how many (1e6)")
    parser.add_argument("--seed", type=int, default=1, help="of sizes and holding times (1)")
    options = parser.parse_args()
    with_torch = importlib.util.find_spec("torch") is not None
    parts = soak(int(options.executions), options.seed, with_torch, lambda s: print(s, flush=True))
    text, wrong = judge(parts)
    print(text)
    print("FAILED: " + ", ".join(wrong) if wrong else "good")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
