"""One phase of the injected-fault run: in a process of its own, under the injector.

Call k of a process is failed, for k from 1 on until there are no more calls. After each: the outcome was
the right value or an error that says something, the same without a fault gives the right value, and
nothing is left of it.
"""

import faulthandler
import gc
import json
import os
import sys
import time

import cloudpickle
import numpy as np
from faults_control import SYSTEM_CALLS, Control
from faults_phases import PHASES, Wrong, left_here

from conveyor.exceptions import ActorDiedError, ActorStartError, WaitTimeoutError

cloudpickle.register_pickle_by_value(sys.modules["faults_phases"])

#: s; nothing in a phase takes as long, and no error that is right does either.
HANG = 20
#: s; what ends by itself has ended by then. It is waited for where it is known what is to be left.
SETTLE, MOMENT = 20, 0.2


class Run:
    """One phase with one kind of call failed in one process."""

    def __init__(self, phase, where, calls, first, step, most):
        self.phase, self.where, self.calls = phase, where, calls
        self.first, self.step, self.most = first, step, most
        self.control = Control()
        self.findings, self.deaths, self.errors, self.count = [], 0, 0, 0
        self.sessions = 0

    def report(self):
        return {
            "phase": self.phase.name,
            "where": self.where,
            "calls": "system calls" if self.calls == SYSTEM_CALLS else "allocations",
            "count": self.count,
            "errors": self.errors,
            "deaths": self.deaths,
            "sessions": self.sessions,
            "findings": self.findings,
        }

    def run(self):
        self.begin()
        number = self.first
        while number <= self.most:
            fault = self.once(number)
            if not fault:
                break
            self.count += 1
            number += self.step
        self.phase.close()

    def begin(self):
        self.sessions += 1
        self.phase.open()
        for _ in range(3):  # imports, caches, first mappings
            self.phase.run()
        self.settled = self.left()

    def once(self, number):
        faulthandler.dump_traceback_later(4 * HANG, exit=True)
        target = {"pid": os.getpid()}
        if self.where == "actor":
            target = {"pid": self.phase.pids[0]}
        elif self.where == "peer":
            target = {"pid": self.phase.pids[1]}
        elif self.where == "server":
            target = {"pid": _children(os.getpid())[0]}
        elif self.where == "newcomers":
            target = {"old": (os.getpid(), *_children(os.getpid()), *self.phase.pids)}
        began = time.monotonic()
        error = None
        with self.control.armed(number, self.calls, **target):
            try:
                self.phase.run()
            except Wrong as wrong:
                self.find(number, f"a wrong value: {wrong}")
            except Exception as raised:
                error = raised
        fault = self.control.failed
        took = time.monotonic() - began
        if not fault:
            if error is not None:
                self.find(number, f"an error without a fault: {error!r}")
            return ""
        if took > HANG / 2 or isinstance(error, WaitTimeoutError):
            self.find(number, f"{fault}: hangs ({took:.0f} s): {_short(error)}")
        if error is not None:
            self.errors += 1
            if not str(error):
                self.find(number, f"{fault}: an error that says nothing: {error!r}")
        if error is not None:
            # Its traceback holds the phase's values.
            text = _short(error)
            died = _hurt(error)
            error.__traceback__ = None
            error = None
        else:
            text, died = "no error", False
        self.check(number, f"{fault}: {text}", died)
        return fault

    def check(self, number, what, died):
        """Without a fault it goes well again, unless the session has lost an actor; and nothing is left."""
        self.deaths += died
        again = None
        try:
            self.phase.run()
        except Exception as error:
            again, lost = f"{type(error).__name__}: {error}", _hurt(error)
            error.__traceback__ = None
            if lost and self.phase.lasting:
                self.deaths += not died
            else:
                self.find(number, f"{what}; and then without a fault: {again[:300]}")
        if again is not None:
            self.renew()
            return
        left = self.left(self.settled)
        grown = {n: (self.settled.get(n, 0), left[n]) for n in _more(left, self.settled)}
        if grown:
            self.find(number, f"{what}; left: {grown}")
            self.settled = left

    def renew(self):
        """The session is hurt: it ends in good order, and leaves nothing."""
        self.phase.close()
        self.begin()

    def left(self, expected=None):
        """What there is once what ends by itself has ended: when it is no more than ``expected``, or in the
        beginning, when that is not known, after a moment."""
        end = time.monotonic() + (SETTLE if expected is not None else MOMENT)
        while True:
            gc.collect()
            now = {**left_here(), **self.phase.left()}
            if expected is not None and not _more(now, expected):
                return now
            if time.monotonic() > end:
                return now
            time.sleep(0.01)

    def find(self, number, text):
        self.findings.append(f"call {number}: {text}")
        print(
            f"  {self.phase.name}/{self.where} call {number}: {text}", file=sys.stderr, flush=True
        )


def _hurt(error):
    """Whether the session has lost an actor by it, by name: one that is dead or was never made."""
    made = getattr(error, "node", None) or ""
    return isinstance(error, (ActorDiedError, ActorStartError)) or made.endswith(".__init__")


def _more(now, expected):
    return [name for name, count in now.items() if count > expected.get(name, 0) + _slack(name)]


def _slack(name):
    """An arena that had to take a fresh block keeps its mapping, and so do its readers: a few in all."""
    return 6 if name.startswith("mappings") else 0


def _short(error):
    return f"{type(error).__name__}: {str(error)[:200]}"


def _children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


def main(name, where, calls, first, step, most):
    os.environ.setdefault("CONVEYOR_SPIN_US", "20")
    np.ones(1)
    run = Run(PHASES[name](), where, int(calls), int(first), int(step), int(most))
    try:
        run.run()
    finally:
        print(json.dumps(run.report()), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
