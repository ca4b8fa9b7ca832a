"""NIXL between two processes: one reads memory of the other's, and both have registered theirs beforehand."""

from __future__ import annotations

import logging
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import nixl._api

from benchmarks.making import peek, read
from benchmarks.model import Direct
from benchmarks.systems.base import DirectPath, System
from benchmarks.systems.spawned import RemoteMaker


def _agent(name: str) -> Any:
    logging.getLogger("nixl").setLevel(logging.WARNING)
    config = nixl._api.nixl_agent_config(backends=["UCX"])
    return nixl._api.nixl_agent(name, config)


def _serve(_: Direct, line: Connection, made: list[Any]) -> Callable[[], None]:
    agent = _agent("maker")
    registered = agent.register_memory(made)
    line.send(agent.get_agent_metadata())
    line.send(agent.get_serialized_descs(registered.trim()))

    def answer(_: Any = (agent, registered)) -> None:
        """Nothing is to be done, but both have to be there."""

    return answer


class NixlSystem(System):
    name = "nixl"
    package = "nixl"

    def direct_path(self, spec: Direct) -> DirectPath:
        import torch

        torch.set_num_threads(1)
        maker = RemoteMaker(spec, _serve)
        agent = _agent("reader")
        target = torch.zeros(spec.nbytes, dtype=torch.uint8)
        cut = list(target.view(spec.count, spec.size))
        agent.register_memory([target])
        peer = agent.add_remote_agent(maker.line.recv())
        remote = agent.deserialize_descs(maker.line.recv())
        local = agent.get_xfer_descs(cut)
        look = peek if spec.peeks else read

        def make(number: int) -> None:
            if spec.use != "call":
                maker.make(number)

        def pull(_: Any) -> list[int]:
            handle = agent.initialize_xfer("READ", local, remote, peer)
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            if state != "DONE":
                raise RuntimeError(f"the transfer ends as {state}")
            agent.release_xfer_handle(handle)
            if spec.use == "into":
                return []
            return [look(cut if spec.count > 1 else target)]

        return DirectPath(
            make, pull, compute=maker.compute, close=maker.close, target=target, maker=maker.pid
        )
