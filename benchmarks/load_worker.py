"""A process that sends completion requests and records when their tokens arrive: the load generator of
serve_load.py.

    python -m benchmarks.load_worker stub|client|http|library WHERE

stub     bare gRPC stubs; WHERE is a server's address
http     /v1/completions over plain sockets, cheaper for a client than any HTTP library; WHERE is the URL
         before the path
client   jengine.client.AsyncClient
library  an AsyncLLM in this process; WHERE is its EngineConfig, as JSON

Each line of stdin is a plan, `{"requests": [[prompt_token_ids, max_tokens, at], ...], "concurrency": n}`, and
is answered by a line of stdout, `{"seconds": from first to last, "records": [{"due", "error", "times",
"tokens"}, ...]}`. `at` is the time at which a request is due, in seconds from the beginning, independent of
earlier requests; null: as soon as fewer than `concurrency` requests run.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from jengine import AsyncLLM, JengineError, SamplingParams

Request = tuple[list[int], int, float | None]
# (prompt, max_tokens) to the numbers of tokens as they arrive
Generate = Callable[[list[int], int], AsyncIterator[int]]


async def stub(address: str) -> Generate:
    import grpc

    from jengine.serving.generated.jengine.v1 import generate_pb2 as pb
    from jengine.serving.grpc.client_messages import GenerateServiceStub

    method = GenerateServiceStub(grpc.aio.insecure_channel(address)).GenerateStream

    async def ask(prompt: list[int], max_tokens: int) -> AsyncIterator[int]:
        params = pb.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        async for event in method(
            pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling_params=params)
        ):
            yield len(event.delta.token_ids)

    return ask


async def client(address: str) -> Generate:
    from jengine.serving.grpc.client import AsyncClient

    connected = AsyncClient(address)

    async def ask(prompt: list[int], max_tokens: int) -> AsyncIterator[int]:
        async for news in connected.stream(prompt, greedy(max_tokens)):
            yield len(news.outputs[0].token_ids)

    return ask


async def library(config: str) -> Generate:
    llm = AsyncLLM(**json.loads(config), progress=False)

    async def ask(prompt: list[int], max_tokens: int) -> AsyncIterator[int]:
        async for output in llm.generate(prompt, greedy(max_tokens), output_kind="delta"):
            yield len(output.outputs[0].token_ids)

    return ask


async def http(url: str) -> Generate:
    host, _, port = url.partition("://")[2].partition("/")[0].rpartition(":")

    async def ask(prompt: list[int], max_tokens: int) -> AsyncIterator[int]:
        """Counts tokens by their ids, as in the other arms."""
        asked = {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        body = json.dumps(asked).encode()
        kind = "Content-Type: application/json\r\nConnection: close"
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\n{kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(head.encode() + body)
            status = await reader.readline()
            if b" 200 " not in status:
                raise JengineError(status.decode())
            async for line in reader:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    yield sum(len(choice["token_ids"]) for choice in event["choices"])
        finally:
            writer.close()

    return ask


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


async def fire(ask: Generate, requests: list[Request], concurrency: int | None) -> dict[str, Any]:
    """Sends all requests and waits for the last token."""
    from grpc import RpcError

    records: list[dict[str, Any]] = []
    waiting = iter(requests)
    start = time.perf_counter()

    async def one(prompt: list[int], max_tokens: int, at: float | None) -> None:
        due = time.perf_counter() - start if at is None else at
        times: list[float] = []
        tokens: list[int] = []
        record = {"due": due, "error": "", "times": times, "tokens": tokens}
        records.append(record)
        try:
            async for count in ask(prompt, max_tokens):
                if count:
                    times.append(time.perf_counter() - start)
                    tokens.append(count)
        except (RpcError, JengineError) as error:
            record["error"] = str(error)

    async def place() -> None:
        for request in waiting:
            await one(*request)

    async with asyncio.TaskGroup() as group:
        if concurrency is not None:
            for _ in range(concurrency):
                group.create_task(place())
        else:
            for request in requests:
                await asyncio.sleep(max(0.0, (request[2] or 0.0) - (time.perf_counter() - start)))
                group.create_task(one(*request))
    return {"seconds": time.perf_counter() - start, "records": records}


async def main() -> None:
    kind, where = sys.argv[1:]
    ask = await {"stub": stub, "client": client, "http": http, "library": library}[kind](where)
    while line := await asyncio.to_thread(sys.stdin.readline):
        gc.collect()
        gc.freeze()  # excludes objects of earlier plans from garbage collection
        print(json.dumps(await fire(ask, **json.loads(line))), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
