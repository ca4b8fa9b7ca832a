"""``python tests/chaos``: random graphs, random faults, every result checked. See ``--help``."""

from __future__ import annotations

import argparse
import faulthandler
import random
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))

from chaos_run import run


def main() -> int:
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600, help="how long (600)")
    parser.add_argument("--rounds", type=int, help="at most so many rounds")
    parser.add_argument("--at-least", type=int, default=0, help="longer, for so many rounds")
    parser.add_argument("--seed", type=int, help="of the whole run; drawn by lot if not said")
    parser.add_argument("--replay", type=int, metavar="SEED", help="one round, again and again")
    parser.add_argument("--times", type=int, default=20, help="how often with --replay (20)")
    parser.add_argument("--only", metavar="KIND", help="only rounds of kinds that begin so")
    parser.add_argument("--hang", type=float, default=30, help="seconds that are a hang (30)")
    parser.add_argument("--nodes", action="store_true", help="over nodes of a Ray cluster instead")
    parser.add_argument("--breaks", action="store_true", help="with --nodes: nobody is to be lost")
    options = parser.parse_args()
    faulthandler.enable()
    if options.nodes:
        return run_over_nodes(options)
    if options.replay is not None:
        limits = options.seconds, None, options.hang
        return run(options.replay, *limits, replay=options.times, only=options.only)
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    limits = options.seconds, options.rounds, options.hang, options.at_least
    return run(seed, *limits, only=options.only)


def run_over_nodes(options: argparse.Namespace) -> int:
    """Rounds on Ray, whose nodes share no memory."""
    import chaos_nodes_run

    seed = options.replay if options.replay is not None else options.seed
    if seed is None:
        seed = random.SystemRandom().randrange(1 << 32)
    replay = options.times if options.replay is not None else 0
    limits = options.seconds, options.rounds, options.hang
    return chaos_nodes_run.run(seed, *limits, replay, options.breaks)


if __name__ == "__main__":
    sys.exit(main())
