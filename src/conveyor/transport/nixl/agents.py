"""NIXL's agents: a process has one that offers memory, and one that reads what others offer.

They are two, so that who offers something never waits for what is being read. Neither has NIXL's own thread,
which would keep a core busy as long as there is an agent.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_numbers = itertools.count()

#: What UCX and NIXL are told, unless the environment says something else: no sockets but on loopback; that a
#: process dies is for Conveyor's handlers to tell; no notices of what goes well.
_SETTINGS = {"UCX_NET_DEVICES": "lo", "UCX_ERROR_SIGNALS": "", "NIXL_LOG_LEVEL": "WARN"}


def make_agent(purpose: str) -> Any:
    """Start an agent that any thread may use, under a name that no other process has. It takes half a
    second.

    Raises whatever NIXL raises.
    """
    with _settings() as ours:
        from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t

        if "NIXL_LOG_LEVEL" in ours:  # it may have been imported before, and knows one by then
            logging.getLogger("nixl").setLevel(logging.WARNING)
        name = f"{purpose}-{os.getpid()}-{next(_numbers)}-{os.urandom(4).hex()}"
        config = nixl_agent_config(
            enable_prog_thread=False,
            backends=["UCX"],
            sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        agent = nixl_agent(name, config)
    if "UCX" not in agent.backends:
        raise RuntimeError("this build of NIXL has no UCX")
    return agent


@contextmanager
def _settings() -> Iterator[dict[str, str]]:
    """UCX reads the environment when it is loaded, and when an agent starts."""
    ours = {name: value for name, value in _SETTINGS.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield ours
    finally:
        for name in ours:
            os.environ.pop(name, None)
