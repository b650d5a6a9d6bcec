"""Images in OpenAI's and Anthropic's APIs, over gRPC, and on their way to the engine's process."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.image_attacks import bomb
from jengine import AsyncLLM, InvalidArgument, SamplingParams
from jengine.client import AsyncClient
from jengine.serving.calls.model_provider import FixedModel, ModelInfo
from jengine.serving.config import ServerConfig
from jengine.serving.grpc.server import build_server
from jengine.serving.http.embedded import EmbeddedApi
from jengine.serving.metrics.server_metrics import Metrics
from jengine.serving.processes.wire import (
    Add,
    Frames,
    Gallery,
    Order,
    add_order,
    frame,
    picture_orders,
    requests_of,
)
from jengine.spi import ImagePart, PromptImages, Request
from tests.engine.on_demand import on_demand
from tests.engine.running import SMALL
from tests.golden.images import picture, write_image_model
from tests.vision.test_images import ANIMATED


def url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def png(size: tuple[int, int]) -> bytes:
    buffer = io.BytesIO()
    picture("asked", size).save(buffer, "PNG")
    return buffer.getvalue()


def asked(*images: Any, **more: Any) -> bytes:
    parts = [{"type": "image_url", "image_url": image} for image in images]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}]
    body = {"messages": messages, "max_completion_tokens": 4, "temperature": 0, "return_token_ids": True}
    return json.dumps({**body, **more}).encode()


REFUSED = [  # image_url, field, limit
    ({"url": "https://example.com/a.png"}, "", "the host example.com is not one of --allowed-media-domains"),
    ({"url": "http://localhost:22/"}, "", "the host localhost is not one of"),
    ({"url": "file:///etc/passwd"}, "", "this server reads no files"),
    ({"url": "/etc/passwd"}, "", "must be a data URL"),
    ({"url": 5}, ".url", "must be a data URL"),
    ({"url": url(png((9, 9))), "detail": "much"}, ".detail", "must be auto, low or high"),
    ({"url": url(png((9, 9))), "more": 1}, "", "must have url and detail only"),
    ({"url": url(b"<html>", "text/html")}, "", "must be a data URL of an image"),
    ({"url": url(ANIMATED, "image/gif")}, "", "animated images are not supported"),
    ({"url": url(bomb(50_000, 50_000))}, "", "at most"),
    ({"url": url(png((50, 40))[:300])}, "", "cannot be decoded"),
]


def test_chat_completions(tmp_path: Path) -> None:
    """Answers as the library, counts the images' tokens, and refuses the rest while others are answered."""
    write_image_model(tmp_path, "smolvlm")
    images = socket.create_server(("127.0.0.1", 0))

    async def work() -> None:
        with on_demand():
            llm = AsyncLLM(
                tmp_path, progress=False, max_model_len=256, limit_mm_per_prompt={"image": 2}, **SMALL
            )
        async with llm:
            host = f"127.0.0.1:{images.getsockname()[1]}"
            api = EmbeddedApi(llm, "smolvlm", ServerConfig(allowed_media_domains=host))
            try:
                await check(llm, api)
            finally:
                api.close()

    async def check(llm: AsyncLLM, api: EmbeddedApi) -> None:
        bodies = [asked({"url": url(png((60, 20)))}), *(asked(image) for image, _, _ in REFUSED)]
        first, *refused = await asyncio.gather(*[api.post("/v1/chat/completions", body) for body in bodies])
        answer = json.loads(first.body)
        assert first.status == 200, answer
        content = [{"type": "image", "image": picture("asked", (60, 20))}, {"type": "text", "text": "What?"}]
        params = SamplingParams(temperature=0.0, max_tokens=4)
        async for output in llm.chat([{"role": "user", "content": content}], params):
            alone = output
        assert answer["choices"][0]["token_ids"] == alone.outputs[0].token_ids
        assert answer["usage"]["prompt_tokens"] == len(alone.prompt_token_ids) > 30
        for reply, (_, field, limit) in zip(refused, REFUSED, strict=True):
            error = json.loads(reply.body)["error"]
            assert reply.status == 400 and limit in error["message"], error
            assert error["param"] == f"messages[0].content[0].image_url{field}"
        encoded = await patches(llm)
        await others_agree(api, answer)
        assert await patches(llm) == encoded > 0, "the image is encoded once, whatever asks about it"
        await others_name_their_fields(api)
        await addresses_and_sizes(api, answer, images)
        await grpc_agrees(llm, answer)
        many = await api.post("/v1/chat/completions", asked(*[{"url": url(png((9, 9)))}] * 3))
        assert (
            many.status == 400 and "at most 2 images in a prompt" in json.loads(many.body)["error"]["message"]
        )

    asyncio.run(work())


async def patches(llm: AsyncLLM) -> int:
    """Patches of images that were encoded, from the records of steps."""
    return sum(step.patches for step in (await llm.trace()).steps)


async def others_agree(api: EmbeddedApi, answer: Any) -> None:
    """The same image in the other APIs has the same answer and the same number of tokens."""
    data, question = base64.b64encode(png((60, 20))).decode(), {"type": "text", "text": "What?"}
    source = {"type": "base64", "media_type": "image/png", "data": data}
    messages = [{"role": "user", "content": [{"type": "image", "source": source}, question]}]
    body = {"model": "smolvlm", "messages": messages, "max_tokens": 4, "temperature": 0}
    message = json.loads((await api.post("/v1/messages", json.dumps(body).encode())).body)
    text = answer["choices"][0]["message"]["content"]
    assert message["content"][0]["text"] == text, message
    used = message["usage"]
    tokens = answer["usage"]["prompt_tokens"]
    assert used["input_tokens"] + used["cache_read_input_tokens"] == tokens
    parts = [
        {"type": "input_image", "image_url": url(png((60, 20)))},
        {"type": "input_text", "text": "What?"},
    ]
    given = [{"role": "user", "content": parts}]
    body = {"model": "smolvlm", "input": given, "max_output_tokens": 4, "temperature": 0}
    response = json.loads((await api.post("/v1/responses", json.dumps(body).encode())).body)
    assert response["output"][-1]["content"][0]["text"] == text, response
    assert response["usage"]["input_tokens"] == tokens


async def others_name_their_fields(api: EmbeddedApi) -> None:
    """Errors name the image by its place in the API's own body, though messages are joined."""
    bad, text = url(b"<svg/>"), {"type": "text", "text": "What?"}
    source = {"type": "base64", "media_type": "image/png", "data": bad.partition(",")[2]}
    result = [{"type": "text", "text": "See"}, {"type": "image", "source": {"type": "url", "url": bad}}]
    called = {"type": "tool_use", "id": "1", "name": "see", "input": {}}
    turns = [
        {"role": "user", "content": [text]},
        {"role": "user", "content": [text, {"type": "image", "source": source}]},
    ]
    tools = [turns[0], {"role": "assistant", "content": [called]}]
    tools += [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": result}]}]
    for messages, field in (
        (turns, "messages[1].content[1].source"),
        (tools, "messages[2].content[0].content[1].source.url"),
    ):
        body = {"model": "smolvlm", "messages": messages, "max_tokens": 4}
        reply = await api.post("/v1/messages", json.dumps(body).encode())
        assert reply.status == 400 and json.loads(reply.body)["error"]["message"].startswith(f"{field}: ")
    parts = [{"type": "input_text", "text": "What?"}, {"type": "input_image", "image_url": bad}]
    given = [{"type": "reasoning", "summary": []}, {"role": "user", "content": parts}]
    reply = await api.post("/v1/responses", json.dumps({"model": "smolvlm", "input": given}).encode())
    assert reply.status == 400
    assert json.loads(reply.body)["error"]["param"] == "input[1].content[1].image_url"


async def addresses_and_sizes(api: EmbeddedApi, answer: Any, images: socket.socket) -> None:
    """An image from a listed host has the same answer; a request's own size makes another prompt."""
    served = png((60, 20))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nContent-Length: %d\r\n\r\n" % len(served)
        )
        writer.write(served)
        await writer.drain()
        writer.close()

    address = f"http://127.0.0.1:{images.getsockname()[1]}/a.png"
    async with await asyncio.start_server(serve, sock=images):
        fetched = await api.post("/v1/chat/completions", asked({"url": address}))
    choice = json.loads(fetched.body)["choices"][0]
    assert choice["token_ids"] == answer["choices"][0]["token_ids"]
    split = {"mm_processor_kwargs": {"do_image_splitting": False}}
    whole = json.loads((await api.post("/v1/chat/completions", asked({"url": url(served)}, **split))).body)
    assert 0 < whole["usage"]["prompt_tokens"] < answer["usage"]["prompt_tokens"]
    for wrong, limit in (
        ({"fps": 2}, "mm_processor_kwargs.fps=2: is not supported"),
        ({"max_pixels": 9}, "only size.longest_edge and do_image_splitting"),
        ({"size": {"longest_edge": 4000}}, "at most the engine's"),
    ):
        reply = await api.post("/v1/chat/completions", asked({"url": url(served)}, mm_processor_kwargs=wrong))
        error = json.loads(reply.body)["error"]
        assert reply.status == 400 and limit in error["message"], error
        assert error["param"].startswith("mm_processor_kwargs"), error


async def grpc_agrees(llm: AsyncLLM, answer: Any) -> None:
    """The same image over gRPC, in a conversation and in a prompt; errors have the proto's fields."""
    info = ModelInfo(name="smolvlm", limits=llm.backend.limits, dtype="")
    built = await build_server(ServerConfig(grpc_port=0), FixedModel(llm, info), metrics=Metrics())
    await built.server.start()
    params = SamplingParams(temperature=0.0, max_tokens=4)
    image, data, question = picture("asked", (60, 20)), png((60, 20)), {"type": "text", "text": "What?"}
    try:
        async with AsyncClient(f"127.0.0.1:{built.port}") as client:
            for part in (
                {"type": "image", "image": data},
                {"type": "image", "image": image},
                {"type": "image_url", "image_url": {"url": url(data)}},
            ):
                output = await client.chat([{"role": "user", "content": [part, question]}], params)
                assert output.outputs[0].token_ids == answer["choices"][0]["token_ids"]
                assert output.usage is not None
                assert output.usage.prompt_tokens == answer["usage"]["prompt_tokens"]
            prompt: Any = {
                "prompt": "See <image> and <image>.",
                "multi_modal_data": {"image": [data, image]},
                "mm_processor_kwargs": {"do_image_splitting": False},
            }
            async for output in llm.generate(prompt, params):
                alone = output
            assert (await client.generate(prompt, params)).outputs[0].token_ids == alone.outputs[0].token_ids
            bad = [{"role": "user", "content": [question, {"type": "image", "image": b"<svg/>"}]}]
            with pytest.raises(InvalidArgument, match="one of the formats") as wrong:
                await client.chat(bad, params)
            assert wrong.value.field == "messages[0].parts[1].image.data"
            with pytest.raises(InvalidArgument, match="at most 2 images") as wrong:
                await client.generate({"prompt": "", "multi_modal_data": {"image": [data] * 3}}, params)
            assert wrong.value.field == "images"
            away = [{"role": "user", "content": [{"type": "image", "image": "http://127.0.0.1/a.png"}]}]
            with pytest.raises(InvalidArgument, match="this server opens no addresses"):
                await client.chat(away, params)
    finally:
        await built.server.stop(None)
        built.shared.close()


@pytest.mark.parametrize("masked", [False, True])
def test_parts_are_sent_once_and_before_their_prompt(masked: bool) -> None:
    rng = np.random.default_rng(0)
    pixels = rng.random((2, 4, 3), np.float32)
    places = np.arange(8, dtype=np.int32).reshape(2, 4, 1)
    one, two = (ImagePart(key, pixels[key], places[key], 2, (1, 2)) for key in range(2))
    images = PromptImages((one, two, one), [1, 2, 4, 5, 7, 8])
    params = SamplingParams(structured_outputs={"regex": "a"}) if masked else SamplingParams()
    request = Request(request_id="r", prompt_token_ids=[*range(10)], params=params, images=images)
    frames: Frames[Order] = Frames(Order)
    orders = [frame(order) for order in (*picture_orders((request,)), add_order((request,)))]
    *pictures, add = frames.take(b"".join(orders))
    assert len(pictures) == 2 and isinstance(add, Add) and add.pictures is not None
    gallery = Gallery()
    for order in pictures:
        gallery.keep(order)
    gallery.give(add.pictures)
    [got] = requests_of(add, None)
    assert got.images is not None and got.images.positions == images.positions
    for mine, theirs in zip(got.images.parts, images.parts, strict=True):
        assert (mine.key, mine.rows, tuple(mine.grid)) == (theirs.key, theirs.rows, theirs.grid)
        assert np.array_equal(mine.pixels, theirs.pixels) and np.array_equal(mine.places, theirs.places)
