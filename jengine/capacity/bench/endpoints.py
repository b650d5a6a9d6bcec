"""Servers under test, with OpenAI's API or jengine's gRPC, and how requests are sent when due."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import ssl
import time
from collections.abc import AsyncIterator, Callable
from typing import Any
from urllib.parse import urlsplit

from jengine.base.errors import InvalidArgument, JengineError
from jengine.capacity.bench.result import ClientRecord
from jengine.capacity.bench.workload import BenchRequest

HEAD = 1 << 16  # maximum bytes of a line
# if a server cannot be reached, rejects requests, or sends invalid responses
ERRORS = (JengineError, OSError, ValueError, KeyError)


class OpenAIEndpoint:
    """OpenAI's API. Opens a connection per request on plain sockets, since an HTTP library would need more
    time than a small model.

    Args:
        base_url: http://host:port or https://..., without the path.
        endpoint: /v1/completions or /v1/chat/completions.
        model: model name in requests; None: the first that the server lists.

    Raises:
        InvalidArgument: the URL is invalid.
    """

    def __init__(
        self,
        base_url: str,
        endpoint: str,
        model: str | None,
        *,
        api_key: str | None = None,
        ignore_eos: bool = True,
    ) -> None:
        form = InvalidArgument("base_url", base_url, "must be http://HOST:PORT or https://HOST:PORT")
        url = urlsplit(base_url)
        try:
            port = url.port
        except ValueError:  # not a number
            raise form from None
        if url.scheme not in ("http", "https") or not url.hostname:
            raise form
        self._host, self._port = url.hostname, port or (443 if url.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._path, self._model, self._key, self._ignore_eos = endpoint, model, api_key, ignore_eos
        self._chat = endpoint.endswith("/chat/completions")

    async def reach(self) -> None:
        """Raises one of ERRORS if nothing answers, or something else does."""
        _, writer = await asyncio.open_connection(self._host, self._port)
        writer.close()
        await self._name()  # not within the first requests' times

    async def stream(self, request: BenchRequest) -> AsyncIterator[tuple[int, int]]:
        """Yields (new tokens, prompt tokens); 0 prompt tokens if the server has not reported them.

        Raises:
            JengineError, OSError: the request failed.
        """
        counts = {"include_usage": True}
        body: dict[str, Any] = {
            "model": await self._name(),
            "temperature": 0.0,
            "stream": True,
            "max_tokens": request.output,
            "stream_options": counts,
        }
        if self._ignore_eos:  # extensions of vLLM and jengine
            body["ignore_eos"] = counts["continuous_usage_stats"] = True
        if self._chat:
            if not isinstance(request.prompt, str):
                request = BenchRequest(" ".join(f"w{token}" for token in request.prompt), request.output)
            body["messages"] = [{"role": "user", "content": request.prompt}]
        else:
            body["prompt"] = request.prompt
        seen = 0
        async for line in self._lines("POST", self._path, body):
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise JengineError(str(event["error"]))
            usage = event.get("usage") or {}
            text = any(
                choice.get("text") or (choice.get("delta") or {}).get("content")
                for choice in event.get("choices", ())
            )
            total = usage.get("completion_tokens", seen + 1 if text else seen)
            if total > seen:
                yield total - seen, usage.get("prompt_tokens", 0)
                seen = total

    async def tokens(self, text: str) -> int:
        """Number of tokens of a text. Raises as `stream`."""
        answer = await self._json("POST", "/tokenize", {"model": await self._name(), "prompt": text})
        return int(answer["count"])

    async def close(self) -> None:
        """Does nothing: each request closes its connection."""

    async def _name(self) -> str:
        if self._model is None:
            models = await self._json("GET", "/v1/models")
            try:
                self._model = str(models["data"][0]["id"])
            except (LookupError, TypeError) as error:
                raise JengineError("/v1/models names no model; give --model") from error
        return self._model

    async def _json(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        return json.loads(b"".join([line async for line in self._lines(method, path, body)]))

    async def _lines(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> AsyncIterator[bytes]:
        """Lines of a response body."""
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls, limit=HEAD)
        try:
            host = f"[{self._host}]" if ":" in self._host else self._host  # IPv6
            data = b"" if body is None else json.dumps(body).encode()
            lines = [
                f"{method} {path} HTTP/1.1",
                f"Host: {host}:{self._port}",
                "Connection: close",
                f"Content-Length: {len(data)}",
                "Content-Type: application/json",
                *([] if self._key is None else [f"Authorization: Bearer {self._key}"]),
            ]
            writer.write("\r\n".join([*lines, "", ""]).encode() + data)
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
            chunked = any(line.startswith("transfer-encoding:") and "chunked" in line for line in head)
            rest = b""
            parts = _chunks(reader) if chunked else _whole(reader)
            if " 200 " not in f"{head[0]} ":
                raise JengineError(
                    f"{head[0]}: {b''.join([part async for part in parts])[:500].decode('utf-8', 'replace')}"
                )
            async for part in parts:
                *complete, rest = (rest + part).split(b"\n")
                for line in complete:
                    yield line.rstrip(b"\r")
            if rest:
                yield rest
        except asyncio.IncompleteReadError as error:
            raise JengineError("the server closed the connection before the end of an answer") from error
        finally:
            writer.close()


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        yield (await reader.readexactly(size + 2))[:-2]


async def _whole(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while part := await reader.read(HEAD):
        yield part


class JengineEndpoint:
    """jengine's gRPC service, with the methods of OpenAIEndpoint.

    Args:
        options: options of jengine.client.AsyncClient.
    """

    def __init__(self, address: str, *, ignore_eos: bool = True, **options: Any) -> None:
        from jengine.client import AsyncClient, Retries

        self._client = AsyncClient(address, retries=Retries(attempts=1), **options)
        self._ignore_eos = ignore_eos

    async def reach(self) -> None:
        await self._client.model()

    async def stream(self, request: BenchRequest) -> AsyncIterator[tuple[int, int]]:
        news = self._client.stream(
            request.prompt, temperature=0.0, max_tokens=request.output, ignore_eos=self._ignore_eos
        )
        async for output in news:
            prompt = 0 if output.usage is None else output.usage.prompt_tokens
            yield sum(len(completion.token_ids) for completion in output.outputs), prompt

    async def tokens(self, text: str) -> int:
        return len(await self._client.tokenize(text))

    async def close(self) -> None:
        await self._client.close()


ServerUnderTest = OpenAIEndpoint | JengineEndpoint


async def drive(
    endpoint: ServerUnderTest,
    requests: list[BenchRequest],
    *,
    max_concurrency: int | None = None,
    done: Callable[[], object] = lambda: None,
) -> tuple[list[ClientRecord], float]:
    """Sends all requests. Returns the answers in the order of the requests, and the seconds to the last
    token.

    Args:
        max_concurrency: maximum number of concurrent requests; the others wait, which counts as part of their
            latency.
        done: called when a request ends.
    """
    places = contextlib.nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
    gc.collect()
    gc.freeze()  # excludes prepared objects from garbage collection
    start = time.perf_counter()

    async def one(request: BenchRequest, answered: ClientRecord) -> None:
        async with places:
            if request.at is None:
                answered.due = time.perf_counter() - start
            try:
                async for tokens, prompt in endpoint.stream(request):
                    answered.prompt_tokens = max(answered.prompt_tokens, prompt)
                    if tokens:
                        answered.times.append(time.perf_counter() - start)
                        answered.tokens.append(tokens)
            except ERRORS as error:
                answered.error = f"{type(error).__name__}: {error}"
        if not answered.times and not answered.error:
            answered.error = "no token arrived"
        if not answered.prompt_tokens and not isinstance(request.prompt, str):
            answered.prompt_tokens = len(request.prompt)
        done()

    answers = [ClientRecord(request.at or 0.0) for request in requests]
    try:
        async with asyncio.TaskGroup() as group:
            for request, answered in zip(requests, answers, strict=True):
                if request.at is not None:
                    await asyncio.sleep(max(0.0, request.at - (time.perf_counter() - start)))
                group.create_task(one(request, answered))
    finally:
        gc.unfreeze()
    last = max(
        [answered.times[-1] for answered in answers if answered.times], default=time.perf_counter() - start
    )
    return answers, last
