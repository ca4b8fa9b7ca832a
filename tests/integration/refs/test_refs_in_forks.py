"""Refs that a forked child of an actor has inherited."""

import os
import time

import numpy as np
from integration_helpers import WAIT

import conveyor


@conveyor.remote
class Forker:
    @conveyor.method(tensor_transport="auto")
    def make(self, path):
        while not os.path.exists(path):
            time.sleep(0.01)
        return np.ones(3)

    def child_gets(self, refs):
        out, into = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                conveyor.get(refs[0], timeout=WAIT)
            except BaseException as error:
                os.write(into, f"{type(error).__name__}: {error}".encode())
            os._exit(0)
        os.close(into)
        os.waitpid(pid, 0)
        with open(out) as said:
            return said.read()


def test_a_forked_child_of_an_actor_waits_for_no_ref_of_its_parents(local, latches):
    go = latches()
    maker, forker = Forker.remote(), Forker.remote()  # which live as long as their handles
    made = maker.make.remote(go.path)  # which has not come when the child asks for it
    said = conveyor.get(forker.child_gets.remote([made]), timeout=WAIT)
    assert said.startswith("RuntimeStateError")
    assert "forked" in said
    go.open()
    assert conveyor.get(made, timeout=WAIT).sum() == 3
