"""Load the server with clients that ask at the same time, and check what it answers.

python examples/llm/load_test.py --clients 8 --requests 24

It starts the server itself. Each answer has to be the one that the same question got when nobody else asked;
some clients go away in the middle, and nothing may be left of their requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import httpx2 as httpx

QUESTIONS = (
    "Why is the sky blue?",
    "Name three fruits.",
    "What is the capital of France?",
    "Write a line about rain.",
    "Count to five.",
    "What do bees make?",
)


class Client:
    """Asks the server, and notes how long it takes."""

    def __init__(self, http: httpx.AsyncClient, limit: int) -> None:
        self._http = http
        self._limit = limit
        self.first: list[float] = []
        self.pieces = 0

    async def ask(self, question: str, pieces: int | None = None) -> str:
        """The streamed answer; of a client that goes away after so many ``pieces``, what it has got."""
        body = {
            "messages": [{"role": "user", "content": question}],
            "max_tokens": self._limit,
            "stream": True,
        }
        text, begun, count = "", time.perf_counter(), 0
        async with self._http.stream("POST", "/v1/chat/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                if not count:
                    self.first.append(time.perf_counter() - begun)
                count += 1
                text += json.loads(line[6:])["choices"][0]["delta"].get("content", "")
                if count == pieces:
                    return text
        self.pieces += count
        return text


async def test(url: str, clients: int, requests: int, limit: int) -> int:
    """Print what was measured; the exit status: 0 if all answers were right."""
    async with httpx.AsyncClient(base_url=url, timeout=300) as http:
        alone = Client(http, limit)
        begun = time.perf_counter()
        right = {question: await alone.ask(question) for question in QUESTIONS}
        seconds_alone = time.perf_counter() - begun

        client, wrong, left = Client(http, limit), 0, iter(range(requests))

        async def work() -> None:
            nonlocal wrong
            for number in left:
                question = QUESTIONS[number % len(QUESTIONS)]
                if number % 5 == 4:  # goes away
                    await client.ask(question, pieces=3)
                else:
                    wrong += await client.ask(question) != right[question]

        begun = time.perf_counter()
        await asyncio.gather(*[work() for _ in range(clients)])
        seconds = time.perf_counter() - begun
        end = time.perf_counter() + 10
        while (await http.get("/stats")).json()["running"] and time.perf_counter() < end:
            await asyncio.sleep(0.01)
        running = (await http.get("/stats")).json()["running"]

    rows = [
        ("answers that differ from those to a single client", f"{wrong}"),
        ("requests left of clients that have gone", f"{running}"),
        ("tokens/s, one client", f"{alone.pieces / seconds_alone:.0f}"),
        (f"tokens/s, {clients} clients", f"{client.pieces / seconds:.0f}"),
        ("ms to the first token, median", f"{1e3 * median(client.first):.0f}"),
        ("ms to the first token, longest", f"{1e3 * max(client.first):.0f}"),
    ]
    print("\n".join(f"  {name:52}{value:>8}" for name, value in rows))
    return 1 if wrong or running else 0


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    while server.poll() is None:
        try:
            httpx.get(f"{url}/v1/models")
        except httpx.TransportError:
            time.sleep(0.2)
        else:
            return
    sys.exit("the server has ended")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--clients", type=int, default=8, help="that ask at the same time")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--stages", type=int, default=2)
    options = parser.parse_args()
    port = free_port()
    script = Path(__file__).with_name("server.py")
    command = [sys.executable, str(script), "--port", str(port), "--stages", str(options.stages)]
    server = subprocess.Popen(command)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for(url, server)
        return asyncio.run(test(url, options.clients, options.requests, options.max_tokens))
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    sys.exit(main())
