"""An OpenAI-compatible server of the language model: ``POST /v1/chat/completions``, streaming or not.

python examples/llm/server.py --stages 2 --port 8000
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import uvicorn
from engine import Engine
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from model_file import LIBRARIES, NAME, open_model_file
from serving import compile_serving, start_serving
from tokens import ChatTokenizer

import conveyor


def make_app(stages: int, batch: int) -> FastAPI:
    """The application; it starts the model's processes when it starts."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        layers = open_model_file().settings["llama.block_count"]
        conveyor.init(preload=LIBRARIES)
        actors = start_serving(stages, layers)
        for actor in actors:
            await actor.held.remote()  # it has loaded its layers
        with compile_serving(actors) as graph:
            async with Engine(graph, in_flight=stages + 1, batch=batch) as engine:
                app.state.engine, app.state.tokenizer = engine, ChatTokenizer()
                app.state.actors = actors
                yield
        conveyor.shutdown()

    app = FastAPI(title=NAME, lifespan=lifespan)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": NAME, "object": "model"}]}

    @app.get("/stats")
    async def stats() -> dict[str, Any]:
        held = [await actor.held.remote() for actor in app.state.actors]
        return {"running": app.state.engine.running, "held": held}

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Any:
        body = await request.json()
        problem = _problem(body)
        if problem is not None:
            return JSONResponse({"error": {"message": problem}}, status_code=400)
        tokens = _answer(app, body)
        if body.get("stream"):
            return StreamingResponse(_events(tokens), media_type="text/event-stream")
        return await _whole(request, tokens)

    return app


def _problem(body: Any) -> str | None:
    """What is wrong with a request, in words."""
    messages = body.get("messages") if isinstance(body, dict) else None
    if not isinstance(messages, list) or not messages:
        return "'messages' must be a list of messages"
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            return "each message is an object with a 'role' and a text as 'content'"
    limit = body.get("max_tokens", 64)
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        return f"'max_tokens' must be a positive integer, not {limit!r}"
    return None


async def _answer(app: FastAPI, body: dict[str, Any]) -> AsyncIterator[str]:
    """The text of the answer, as it comes."""
    tokenizer: ChatTokenizer = app.state.tokenizer
    prompt = tokenizer.prompt(body["messages"][-1]["content"])
    text = tokenizer.text_stream()
    tokens = app.state.engine.generate(prompt, body.get("max_tokens", 64), tokenizer.end)
    async with aclosing(tokens):  # a client that has gone closes this one
        async for token in tokens:
            yield text(token)


async def _events(tokens: AsyncIterator[str]) -> AsyncIterator[str]:
    """Server-sent events, one for each piece of the text."""
    head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": "chat.completion.chunk", "model": NAME}
    async with aclosing(tokens):  # type: ignore[type-var]
        async for text in tokens:
            choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
            yield f"data: {json.dumps({**head, 'choices': [choice]})}\n\n"
    choice = {"index": 0, "delta": {}, "finish_reason": "stop"}
    yield f"data: {json.dumps({**head, 'choices': [choice]})}\n\ndata: [DONE]\n\n"


async def _whole(request: Request, tokens: AsyncIterator[str]) -> Any:
    """The whole answer, unless the client goes meanwhile."""
    pieces: list[str] = []

    async def collect() -> None:
        async with aclosing(tokens):  # type: ignore[type-var]
            async for text in tokens:
                pieces.append(text)

    collecting = asyncio.ensure_future(collect())
    gone = asyncio.ensure_future(_until_gone(request))
    try:
        await asyncio.wait({collecting, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not collecting.done():
            return JSONResponse({"error": {"message": "the client has gone"}}, status_code=499)
        collecting.result()
    finally:
        for task in (collecting, gone):
            task.cancel()
    message = {"role": "assistant", "content": "".join(pieces)}
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": NAME,
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
    }


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--stages", type=int, default=2, help="processes to split the layers over")
    parser.add_argument("--batch", type=int, default=16, help="sequences in one step, at most")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    uvicorn.run(
        make_app(options.stages, options.batch),
        host="127.0.0.1",
        port=options.port,
        access_log=False,
    )


if __name__ == "__main__":
    main()
