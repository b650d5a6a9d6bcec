"""Images in OpenAI's chat completions, and on their way to the engine's process."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jengine import AsyncLLM, ImagePart, PromptImages, Request, SamplingParams
from jengine.serving.http.embedded import EmbeddedApi
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
from tests.engine.on_demand import on_demand
from tests.engine.running import SMALL
from tests.golden.images import picture, write_image_model
from tests.vision.test_images import ANIMATED, bomb


def url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def png(size: tuple[int, int]) -> bytes:
    buffer = io.BytesIO()
    picture("asked", size).save(buffer, "PNG")
    return buffer.getvalue()


def asked(*images: Any) -> bytes:
    parts = [{"type": "image_url", "image_url": image} for image in images]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}]
    body = {"messages": messages, "max_completion_tokens": 4, "temperature": 0, "return_token_ids": True}
    return json.dumps(body).encode()


REFUSED = [  # image_url, field, limit
    ({"url": "https://example.com/a.png"}, "", "addresses are not fetched"),
    ({"url": "http://127.0.0.1:22/"}, "", "addresses are not fetched"),
    ({"url": "file:///etc/passwd"}, "", "must be a data URL"),
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

    async def work() -> None:
        with on_demand():
            llm = AsyncLLM(
                tmp_path, progress=False, max_model_len=256, limit_mm_per_prompt={"image": 2}, **SMALL
            )
        async with llm:
            api = EmbeddedApi(llm, "smolvlm")
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
        await others_agree(api, answer)
        many = await api.post("/v1/chat/completions", asked(*[{"url": url(png((9, 9)))}] * 3))
        assert (
            many.status == 400 and "at most 2 images in a prompt" in json.loads(many.body)["error"]["message"]
        )

    asyncio.run(work())


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
