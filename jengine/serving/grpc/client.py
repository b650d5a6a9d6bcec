"""Blocking and asyncio clients of jengine's gRPC service."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import math
import queue
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import Any, Concatenate, Self

import grpc
import msgspec

from jengine import InvalidArgument, Profile, ProfileOptions, Trace
from jengine.serving.generated.jengine.v1 import generate_pb2 as pb
from jengine.serving.grpc.client_messages import (
    Attempts,
    GenerateServiceStub,
    Messages,
    OutputReader,
    Prompt,
    Retries,
    ServedOutput,
    ServerError,
    StartWait,
    Usage,
    chat_request,
    exception_of,
    generate_request,
)
from jengine.serving.grpc.conversions import sending
from jengine.spi import GenerationParams, uninterrupted

__all__ = ["AsyncClient", "Client", "Retries", "ServedOutput", "ServerError", "Usage"]

CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", -1),  # log probabilities of a long prompt are long
    ("grpc.keepalive_time_ms", 30_000),  # detects a server that has vanished, however long its answer takes
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 100),  # Attempts adds its own pauses
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_retries", 0),
]
SHORT = 30.0  # seconds for calls that generate nothing
PROFILE_SECONDS = 90.0  # to write the captures, beside the profile itself
GRACE = 10.0  # additional seconds after a request's own timeout, for the server to end it


class _Connection:
    """Common parts of both clients. Only the three methods that each client defines may suspend."""

    _grpc: Any  # the module that opens channels

    _response: Callable[[Callable[[], Any]], Awaitable[Any]]  # starts a call, and waits for its response
    _responses: Callable[[Any], AsyncIterator[Any]]  # those of a streaming call that has been started
    _sleep: Callable[[float], Awaitable[None]]

    def __init__(
        self,
        address: str,
        *,
        api_key: str | None = None,
        tls: bool = False,
        tls_ca: str | Path | None = None,
        tls_cert: str | Path | None = None,
        tls_key: str | Path | None = None,
        retries: Retries | None = None,
    ) -> None:
        """
        Args:
            address: host:port.
            api_key: sent with every request.
            tls: use TLS, with the certificate authorities of this machine.
            tls_ca: PEM file of other authorities to trust; turns TLS on.
            tls_cert, tls_key: PEM files of the client's own certificate, for mutual TLS.
            retries: number and duration of retries when the server cannot take a request.

        Raises:
            InvalidArgument: a file cannot be read, or the address is a URL of HTTP.
        """
        if address.startswith(("http://", "https://")):
            raise InvalidArgument("address", address, "must be HOST:PORT of gRPC, by default localhost:50051")
        self.address, self._retries = address, retries or Retries()
        metadata = () if api_key is None else (("authorization", f"Bearer {api_key}"),)
        ca, key, cert = _read("tls_ca", tls_ca), _read("tls_key", tls_key), _read("tls_cert", tls_cert)
        secured = tls or ca is not None or cert is not None
        if secured:
            self._channel = self._grpc.secure_channel(
                address, grpc.ssl_channel_credentials(ca, key, cert), CHANNEL_OPTIONS
            )
        else:
            self._channel = self._grpc.insecure_channel(address, CHANNEL_OPTIONS)
        self._stub = GenerateServiceStub(self._channel)
        self._options = {"metadata": metadata}

    async def _call(
        self,
        method: Callable[..., Any],
        request: Any,
        deadline: float | None,
        attempts: Attempts | StartWait | None = None,
    ) -> Any:
        attempts = attempts or Attempts(self._retries)
        while True:
            try:
                return await self._response(
                    functools.partial(method, request, timeout=deadline, **self._options)
                )
            except grpc.RpcError as error:
                pause = attempts.pause(error)
                if pause is None:
                    raise exception_of(error, request) from None
            await self._sleep(pause)

    async def _whole(self, method: Callable[..., Any], request: Any) -> ServedOutput:
        return OutputReader(request).whole(await self._call(method, request, _deadline(request)))

    async def _news(self, method: Callable[..., Any], request: Any) -> AsyncGenerator[ServedOutput]:
        attempts = Attempts(self._retries)
        while True:
            reader, begun, call = OutputReader(request), False, None
            try:
                # Ctrl-C between gRPC's count of calls and the thread that serves them would stall the channel
                with uninterrupted():
                    call = method(request, timeout=_deadline(request), **self._options)
                async for response in self._responses(call):
                    if (news := reader.news(response)) is not None:
                        begun = True
                        yield news
                return
            except grpc.RpcError as error:
                pause = None if begun else attempts.pause(error)
                if pause is None:
                    raise exception_of(error, request) from None
            finally:
                if call is not None:
                    with uninterrupted():
                        call.cancel()
            await self._sleep(pause)

    async def _do(self, operation: str, arguments: dict[str, Any]) -> str:
        """The answer, as JSON."""
        for name, value in arguments.items():
            if isinstance(value, float) and not math.isfinite(value):  # JSON has no such numbers
                raise InvalidArgument(name, value, "must be a finite number")
        with sending("operation", operation):
            request = pb.DoRequest(
                operation=operation, arguments_json=msgspec.json.encode(arguments).decode()
            )
        try:
            return str((await self._call(self._stub.Do, request, SHORT)).answer_json)
        except InvalidArgument as error:  # its value is within arguments_json
            if error.field not in arguments:
                raise
            raise InvalidArgument(error.field, arguments[error.field], error.limit) from None


def _read(field: str, path: str | Path | None) -> bytes | None:
    try:
        return None if path is None else Path(path).read_bytes()
    except OSError as wrong:
        raise InvalidArgument(field, str(path), f"cannot be read: {wrong.strerror}") from None


def _deadline(request: pb.GenerateRequest | pb.ChatRequest) -> float | None:
    return request.timeout_seconds + GRACE if request.HasField("timeout_seconds") else None


class AsyncClient(_Connection):
    """A client of `jengine serve` for asyncio, with the options of Client. Belongs to one event loop."""

    _grpc = grpc.aio

    async def _response(self, call: Callable[[], Any]) -> Any:
        return await call()

    def _responses(self, call: Any) -> AsyncIterator[Any]:
        responses: AsyncIterator[Any] = call
        return responses

    _sleep = staticmethod(asyncio.sleep)

    async def generate(
        self, /, prompt: Prompt, sampling_params: GenerationParams | None = None, **options: Any
    ) -> ServedOutput:
        """Complete one prompt."""
        return await self._whole(self._stub.Generate, generate_request(prompt, sampling_params, options))

    def stream(
        self, /, prompt: Prompt, sampling_params: GenerationParams | None = None, **options: Any
    ) -> AsyncGenerator[ServedOutput]:
        """Complete one prompt and stream the output.

        Each output has the new text, tokens and logprobs of one completion. The last one has no text, but
        every completion's finish_reason and the usage. Closing the iterator early aborts the request.
        """
        return self._news(self._stub.GenerateStream, generate_request(prompt, sampling_params, options))

    async def chat(
        self, /, messages: Messages, sampling_params: GenerationParams | None = None, **options: Any
    ) -> ServedOutput:
        """Answer one conversation, with the model's chat template."""
        return await self._whole(self._stub.Chat, chat_request(messages, sampling_params, options))

    def chat_stream(
        self, /, messages: Messages, sampling_params: GenerationParams | None = None, **options: Any
    ) -> AsyncGenerator[ServedOutput]:
        """Answer one conversation and stream the answer, as `stream`."""
        return self._news(self._stub.ChatStream, chat_request(messages, sampling_params, options))

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""
        with sending("text", text):
            request = pb.TokenizeRequest(text=text, add_special_tokens=add_special_tokens)
        return list((await self._call(self._stub.Tokenize, request, SHORT)).token_ids)

    async def detokenize(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        with sending("token_ids", token_ids):
            request = pb.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return str((await self._call(self._stub.Detokenize, request, SHORT)).text)

    async def abort(self, request_id: str) -> bool:
        """End a request of this API key, or, on a server without keys, of any client. Returns False if it is
        unknown or has ended.
        """
        return bool((await self._call(self._stub.Abort, pb.AbortRequest(request_id=request_id), SHORT)).found)

    async def model(self) -> pb.GetModelResponse:
        """Describe the served model: name, max_model_len, max_num_seqs, dtype, has_chat_template and more."""
        got: pb.GetModelResponse = await self._call(self._stub.GetModel, pb.GetModelRequest(), SHORT)
        return got

    async def wait_until_ready(
        self, timeout: float = math.inf, progress: Callable[[str], None] = lambda text: None
    ) -> None:
        """Wait for a server that starts.

        Args:
            timeout: seconds after which this gives up.
            progress: called about once a second with what the server does, such as "starting: compiling, 3 of
                9 programs, about 4 s left".

        Raises:
            ServerError: it is not ready in time, or cannot be reached.
        """
        await self._call(
            self._stub.GetModel, pb.GetModelRequest(), SHORT, StartWait(self._retries, timeout, progress)
        )

    async def load(self) -> pb.GetLoadResponse:
        """Return the server's load: running, waiting, free_pages, pages, cached_pages."""
        got: pb.GetLoadResponse = await self._call(self._stub.GetLoad, pb.GetLoadRequest(), SHORT)
        return got

    async def set_strategy(self, strategy: str) -> None:
        """Change the server's strategy: throughput, latency, memory or auto. Needs the same permission as
        reset_prefix_cache."""
        await self._do("SetStrategy", {"strategy": strategy})

    async def do(self, operation: str, /, **arguments: Any) -> Any:
        """Have the engine do an operation by its name, such as `do("SetStrategy", strategy="latency")`.
        Returns the answer, decoded from JSON. Needs the same permission as reset_prefix_cache.

        Raises:
            InvalidArgument: there is no such operation, or an argument is unknown or invalid.
        """
        return msgspec.json.decode(await self._do(operation, arguments))

    async def trace(self, seconds: float | None = None) -> Trace:
        """Return the engine's last `seconds` seconds, or all that is kept, for `jengine.explain`. Needs the
        same permission as reset_prefix_cache.
        """
        return Trace.from_json(await self._do("GetTrace", {"seconds": seconds}))

    async def profile(self, options: ProfileOptions | None = None) -> tuple[Profile, bytes]:
        """Profile the server's processes. Returns the profile, and jax.profiler's capture as a zip file.

        Needs the same permission as reset_prefix_cache.
        """
        options = options or ProfileOptions()
        request = pb.ProfileRequest(**dataclasses.asdict(options))
        deadline = 2 * options.seconds + options.heap_seconds + PROFILE_SECONDS
        answer = await self._call(self._stub.Profile, request, deadline)
        return Profile.from_json(answer.profile), bytes(answer.jax_capture)

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached pages of all clients. Needs an API key with admin=1, or a server without keys on
        this machine."""
        return bool(msgspec.json.decode(await self._do("ResetPrefixCache", {})))

    async def close(self) -> None:
        """Close the connection, and end running requests."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _result[T](step: Awaitable[T]) -> T:
    """The result of a step of Client, which never suspends."""
    try:
        next(step.__await__())
    except StopIteration as done:
        result: T = done.value
        return result
    raise RuntimeError("a blocking client cannot wait for an event loop")


def _blocking[**P, T](
    method: Callable[Concatenate[Any, P], Awaitable[T]],
) -> Callable[Concatenate[Client, P], T]:
    """A method of AsyncClient as one of Client."""

    @functools.wraps(method)
    def call(client: Client, /, *arguments: P.args, **options: P.kwargs) -> T:
        return _result(method(client, *arguments, **options))

    return call


def _blocking_stream[**P, T](
    method: Callable[Concatenate[Any, P], AsyncGenerator[T]],
) -> Callable[Concatenate[Client, P], Generator[T]]:
    def outputs_of(outputs: AsyncGenerator[T]) -> Generator[T]:
        try:
            while True:
                yield _result(anext(outputs))
        except StopAsyncIteration:
            return
        finally:
            _result(outputs.aclose())

    @functools.wraps(method)
    def call(client: Client, /, *arguments: P.args, **options: P.kwargs) -> Generator[T]:
        return outputs_of(method(client, *arguments, **options))

    return call


class Client(_Connection):
    """A blocking client of `jengine serve`. Threads may share one.

    Methods that generate take SamplingParams, or its fields as keywords; methods that chat also take the
    fields of ChatOptions. Prompts and messages have images as for LLM; paths are those of this machine. All
    methods take these options:

    - `request_id`: for `abort`. By default the server makes one.
    - `priority`: lower runs first, if the server's policy is "priority".
    - `ttft_ms`, `tpot_ms`: latency targets in milliseconds for the first token and for each further one,
      instead of the server's.
    - `timeout`: seconds after which the request ends, with finish_reason "abort" and stop_reason "timeout".
    - `cache_salt`: the request shares cached pages only with requests that have the same salt.
    - `model`: the name of a loaded LoRA adapter. By default the model alone answers.

    A request that the server cannot take, because it is full or starting, is retried while nothing of its
    answer has come.

    Raises:
        InvalidArgument: a field of the request is wrong.
        ServerError: the server answered with another error, or could not be reached.

    Examples:
        >>> with Client("127.0.0.1:50051") as client:
        ...     for output in client.stream("def fib(n):", temperature=0.0, max_tokens=100):
        ...         print(output.outputs[0].text, end="")
    """

    _grpc = grpc

    async def _response(self, call: Callable[[], Any]) -> Any:
        return call()

    async def _responses(self, call: Any) -> AsyncIterator[Any]:
        for response in events_of(call):
            yield response

    async def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    generate = _blocking(AsyncClient.generate)
    stream = _blocking_stream(AsyncClient.stream)
    chat = _blocking(AsyncClient.chat)
    chat_stream = _blocking_stream(AsyncClient.chat_stream)
    tokenize = _blocking(AsyncClient.tokenize)
    detokenize = _blocking(AsyncClient.detokenize)
    abort = _blocking(AsyncClient.abort)
    model = _blocking(AsyncClient.model)
    wait_until_ready = _blocking(AsyncClient.wait_until_ready)
    load = _blocking(AsyncClient.load)
    set_strategy = _blocking(AsyncClient.set_strategy)
    do = _blocking(AsyncClient.do)
    trace = _blocking(AsyncClient.trace)
    profile = _blocking(AsyncClient.profile)
    reset_prefix_cache = _blocking(AsyncClient.reset_prefix_cache)

    def close(self) -> None:
        """Close the connection, and end running requests."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def events_of(call: Iterator[Any]) -> Generator[Any]:
    """Yields a gRPC stream's messages on demand. Cancel the call before closing this.

    For the main thread, another thread reads: a KeyboardInterrupt inside gRPC could leave a lock of the
    channel acquired, and every later call would hang. Waiting on Python's own queue can be interrupted
    safely.
    """
    if threading.current_thread() is not threading.main_thread():
        yield from call
        return
    wanted: queue.SimpleQueue[bool] = queue.SimpleQueue()  # False: no more messages are wanted
    events: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
    threading.Thread(target=_read_on_demand, args=(call, wanted, events), name="stream", daemon=True).start()
    try:
        while True:
            wanted.put(True)
            event, error = events.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield event
    finally:
        wanted.put(False)


def _read_on_demand(
    call: Iterator[Any],
    wanted: queue.SimpleQueue[bool],
    events: queue.SimpleQueue[tuple[Any, BaseException | None]],
) -> None:
    error: BaseException | None = None
    while error is None and wanted.get():
        event = None
        try:
            event = next(call)
        except BaseException as ended:  # the stream's end, or an error
            error = ended
        events.put((event, error))
