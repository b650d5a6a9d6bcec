"""A process that asks for completions and notes when their tokens come: the load of serve_load.py.

    python -m benchmarks.load_worker stub|client|http|library WHERE

stub     bare gRPC stubs; WHERE is a server's address
http     /v1/completions over bare sockets, which costs a client less than any HTTP library; WHERE is the URL before the path
client   jengine.client.AsyncClient
library  an AsyncLLM of this process; WHERE is its EngineConfig, as JSON

Each line of stdin is a plan, `{"requests": [[prompt_token_ids, max_tokens, at], ...], "concurrency": n}`, and is answered by a line
of stdout, `{"seconds": from first to last, "records": [{"due", "error", "times", "tokens"}, ...]}`. `at` is when a request is due, in
seconds from the beginning, however the earlier ones fare; null is as soon as one of `concurrency` places is free.
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
Ask = Callable[[list[int], int], AsyncIterator[int]]  # prompt and max_tokens to the numbers of tokens that come


async def stub(address: str) -> Ask:
    import grpc

    from jengine.serving.generated.jengine.v1 import generate_pb2 as pb
    from jengine.serving.generated.jengine.v1.generate_pb2_grpc import GenerateServiceStub

    method = GenerateServiceStub(grpc.aio.insecure_channel(address)).GenerateStream

    async def ask(prompt: list[int], max_tokens: int) -> AsyncIterator[int]:
        params = pb.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        async for event in method(pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling_params=params)):
            yield len(event.delta.token_ids)

    return ask


async def client(address: str) -> Ask:
    from jengine.serving.client import AsyncClient

    connected = AsyncClient(address)

    async def ask(prompt: list[int], max_tokens: int) -> AsyncIterator[int]:
        async for news in connected.stream(prompt, greedy(max_tokens)):
            yield len(news.outputs[0].token_ids)

    return ask


async def library(config: str) -> Ask:
    llm = AsyncLLM(**json.loads(config), progress=False)

    async def ask(prompt: list[int], max_tokens: int) -> AsyncIterator[int]:
        async for output in llm.generate(prompt, greedy(max_tokens), output_kind="delta"):
            yield len(output.outputs[0].token_ids)

    return ask


async def http(url: str) -> Ask:
    host, _, port = url.partition("://")[2].partition("/")[0].rpartition(":")

    async def ask(prompt: list[int], max_tokens: int) -> AsyncIterator[int]:
        """Counts tokens by their ids, as the other arms do."""
        asked = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}
        body = json.dumps(asked).encode()
        kind = "Content-Type: application/json\r\nConnection: close"
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\n{kind}\r\nContent-Length: {len(body)}\r\n\r\n"
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


async def fire(ask: Ask, requests: list[Request], concurrency: int | None) -> dict[str, Any]:
    """Ask for all of this and wait for the last token."""
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
        gc.freeze()  # what earlier plans have left is looked at no more
        print(json.dumps(await fire(ask, **json.loads(line))), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
