"""Refs that a forked child of an actor has inherited."""

import os

import numpy as np
from integration_helpers import WAIT

import conveyor


@conveyor.remote
class Forker:
    @conveyor.method(tensor_transport="auto")
    def make(self):
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


def test_a_forked_child_of_an_actor_waits_for_no_ref_of_its_parents(local):
    made = Forker.remote().make.remote()
    said = conveyor.get(Forker.remote().child_gets.remote([made]), timeout=WAIT)
    assert said.startswith("RuntimeStateError")
    assert "forked" in said
