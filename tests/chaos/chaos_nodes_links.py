"""Connections between the hosts of a session go through a process that cuts, slows and resets them.

Each host is told an address of that process in the place of every other host's, so it knows who has dialled
whom. A cut holds back what is said: the connection stays, and nothing comes, as on a cable that is out.
Run as a program this is that process; it is told what to do over its standard input, a line each.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec

from conveyor.driver.process_engine import Locate, Reach
from conveyor.engines.ray import agents
from conveyor.engines.ray.agents import AgentNode

#: What is read at a time, and is late where a link is slow.
_PIECE = 1 << 16
#: The number of the driver's host.
DRIVER = 0


class Links:
    """All connections of the sessions of this process, once they are diverted."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._lock = threading.Lock()
        self._fronts: dict[tuple[int, int, tuple[str, int]], tuple[str, int]] = {}

    @property
    def pid(self) -> int:
        return self._process.pid

    def divert(self) -> None:
        """From now on hosts are told of this process."""
        terms, dial, send = agents.Terms, agents.Agents._dial, AgentNode.send

        def new_terms(number: int, *said: Any) -> Any:
            made = terms(number, *said)
            return msgspec.structs.replace(
                made, address=self.front(number, DRIVER, tuple(made.address))
            )

        def dialled(own: Any, number: int, address: Any, purpose: int) -> Any:
            return dial(own, number, self.front(DRIVER, number, tuple(address)), purpose)

        def sent(host: AgentNode, order: Any) -> Any:
            if isinstance(order, (Reach, Locate)):
                front = self.front(host.number, order.node, tuple(order.address))
                order = type(order)(order.node, front)
            return send(host, order)

        setattr(agents, "Terms", new_terms)  # noqa: B010 (a class stands there)
        setattr(agents.Agents, "_dial", dialled)  # noqa: B010
        setattr(AgentNode, "send", sent)  # noqa: B010

    def front(self, source: int, target: int, address: tuple[str, int]) -> tuple[str, int]:
        """Where ``source`` finds the one that ``target`` has at ``address``."""
        with self._lock:
            key = source, target, address
            if key not in self._fronts:
                said = self._ask("front", source, target, *address)
                self._fronts[key] = address[0], said
            return self._fronts[key]

    def hold(self, ways: Sequence[tuple[int, int]], held: bool) -> None:
        """Let nothing come from the first of each pair to the second; or no longer, unless others hold it."""
        self._tell("hold", ways, held)

    def slow(self, ways: Sequence[tuple[int, int]], seconds: float) -> None:
        """Have each piece take so much longer."""
        self._tell("slow", ways, seconds)

    def reset(self, ways: Sequence[tuple[int, int]]) -> int:
        """End all connections of these; how many there were."""
        with self._lock:
            return int(self._ask("reset", ways))

    def forget(self) -> None:
        """The session is over, and its hosts are gone."""
        with self._lock:
            self._fronts.clear()
            self._ask("forget")

    def close(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended with this program's group
            self._process.stdin.close()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _tell(self, *what: Any) -> None:
        with self._lock:
            self._ask(*what)

    def _ask(self, *what: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise AssertionError(f"the process of the links has ended ({self._process.poll()})")
        return json.loads(answer)


class _Way:
    """From one host to another one."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.holds = 0
        self.late = 0.0


class _Relay:
    """What the process does."""

    def __init__(self) -> None:
        self._ways: dict[tuple[int, int], _Way] = {}
        self._servers: list[asyncio.Server] = []
        self._connections: dict[tuple[int, int], set[asyncio.StreamWriter]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def _way(self, source: int, target: int) -> _Way:
        return self._ways.setdefault((source, target), _Way())

    async def front(self, source: int, target: int, host: str, port: int) -> int:
        async def come(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            try:
                await self._carry(source, target, (host, port), reader, writer)
            except asyncio.CancelledError:
                pass  # the session is over
            finally:
                self._tasks.discard(task)

        server = await asyncio.start_server(come, host, 0, limit=_PIECE)
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    async def _carry(
        self,
        source: int,
        target: int,
        address: tuple[str, int],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        there, back = self._way(source, target), self._way(target, source)
        both = self._connections.setdefault((source, target), set())
        both.add(writer)
        try:
            # Who dials hears of nothing while one way is cut.
            await there.open.wait()
            await back.open.wait()
            other, out = await asyncio.open_connection(*address, limit=_PIECE)
            both.add(out)
            try:
                await asyncio.gather(_copy(there, reader, out), _copy(back, other, writer))
            finally:
                both.discard(out)
                out.transport.abort()
        except OSError:
            pass  # there is nobody any more
        finally:
            both.discard(writer)
            writer.transport.abort()

    async def hold(self, ways: list[list[int]], held: bool) -> None:
        for way in ways:
            one = self._way(*way)
            one.holds += 1 if held else -1
            if one.holds:
                one.open.clear()
            else:
                one.open.set()

    async def slow(self, ways: list[list[int]], seconds: float) -> None:
        for way in ways:
            self._way(*way).late += seconds

    async def reset(self, ways: list[list[int]]) -> int:
        ended = 0
        for way in ways:
            for writer in list(self._connections.get((way[0], way[1]), ())):
                writer.transport.abort()
                ended += 1
        return ended

    async def forget(self) -> None:
        for server in self._servers:
            server.close()
        for task in list(self._tasks):
            task.cancel()
        self._servers.clear()
        self._ways.clear()

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            name, *said = json.loads(line)
            print(json.dumps(await getattr(self, name)(*said)), flush=True)
        await self.forget()


async def _copy(way: _Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while piece := await reader.read(_PIECE):
            await way.open.wait()
            if way.late:
                await asyncio.sleep(way.late)
            writer.write(piece)
            await writer.drain()
        await way.open.wait()
        with suppress(OSError):
            writer.write_eof()
    except OSError:
        writer.transport.abort()


if __name__ == "__main__":
    asyncio.run(_Relay().serve())
