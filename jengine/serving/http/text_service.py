"""/tokenize, /detokenize and /v1/models."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

import msgspec

from jengine import InvalidArgument
from jengine.serving.calls.adapters import Adapter
from jengine.serving.calls.model_provider import ListedModel
from jengine.serving.calls.named_model import listed_model
from jengine.serving.guards.admission import client_of
from jengine.serving.http.bodies import DETOKENIZE, TOKENIZE
from jengine.serving.http.calls import HttpCall
from jengine.serving.http.endpoint import while_connected
from jengine.serving.http.parts import encoded
from jengine.serving.http.service import TEMPLATE_OPTIONS, HttpService, check_conversation
from jengine.serving.requests.service import check_ids, check_vocabulary

OPTIONS = (*TEMPLATE_OPTIONS, "tools")
STARTED = int(time.time())


class TextService(HttpService):
    """Requests that do not need the engine."""

    async def tokenize(self, call: HttpCall) -> None:
        json_body, size = await self._json(call)
        await while_connected(call, self._tokenize(call, json_body, size))

    async def _tokenize(self, call: HttpCall, json_body: dict[str, Any], size: int) -> None:
        body, model = await self._read(TOKENIZE, json_body, call)
        self._admission.stream(call)
        if ("prompt" in body.fields) == ("messages" in body.fields):
            raise InvalidArgument(
                "prompt", body.get("prompt"), "exactly one of prompt and messages must be given"
            )
        check_conversation(body)
        wrong = ("add_special_tokens",) if "messages" in body.fields else OPTIONS
        for name in wrong:
            # templates write the special tokens themselves
            if name in body.fields and (name, body.get(name)) != ("add_special_tokens", False):
                raise InvalidArgument(
                    name,
                    body.get(name),
                    "is only for prompt" if "messages" in body.fields else "is only for messages",
                )
        tokenizer = model.tokenizer
        if "messages" in body.fields:
            options = {name: body.get(name) for name in OPTIONS if name in body.fields}
            prompt = await self._render(
                model, lambda: (body.get("messages"), options), body.get("chat_template"), size, call
            )
            ids = prompt["prompt_token_ids"]
        else:
            text, special = body.get("prompt"), body.get("add_special_tokens", True)
            ids = await self._text_work.run(client_of(call), size, lambda: tokenizer.encode(text, special))
        answer: dict[str, Any] = {"count": len(ids), "max_model_len": model.max_model_len, "tokens": ids}

        def encode() -> bytes:
            if body.get("return_token_strs"):
                answer["token_strs"] = [tokenizer.token_text(token) for token in ids]
            return msgspec.json.encode(answer)

        await call.answer(200, await self._text_work.run(client_of(call), size, encode))

    async def detokenize(self, call: HttpCall) -> None:
        json_body, size = await self._json(call)
        await while_connected(call, self._detokenize(call, json_body, size))

    async def _detokenize(self, call: HttpCall, json_body: dict[str, Any], size: int) -> None:
        body, model = await self._read(DETOKENIZE, json_body, call)
        self._admission.stream(call)
        tokens = body.get("tokens")
        if tokens is None:
            raise InvalidArgument("tokens", None, "must be given")
        check_ids("tokens", len(tokens), model)
        check_vocabulary("tokens", tokens, model)
        tokenizer = model.llm.tokenizer
        text = await self._text_work.run(
            client_of(call), size, lambda: tokenizer.decode_unlocked(tokens, False)
        )
        await call.answer(200, msgspec.json.encode({"prompt": text}))

    async def models(self, call: HttpCall) -> None:
        served = [self._model(model) for model in (*self._models.listed(), *self._models.adapters)]
        if _of_anthropic(call):
            ends = {"first_id": served[0]["id"], "last_id": served[-1]["id"], "has_more": False}
            await call.answer(200, encoded({"data": [_anthropic(shown) for shown in served], **ends}))
            return
        await call.answer(200, encoded({"object": "list", "data": served}))

    async def model(self, call: HttpCall) -> None:
        shown = self._model(listed_model(call.scope["path_params"]["model"], self._models))
        await call.answer(200, encoded(_anthropic(shown) if _of_anthropic(call) else shown))

    def _model(self, model: ListedModel | Adapter) -> dict[str, Any]:
        """A model, with vLLM's fields. `root`: an adapter's path as it was given. `parent`: the model that an
        adapter changes. `max_model_len`: null if the model was never loaded.
        """
        common = {"object": "model", "owned_by": "jengine"}
        default = self._models.listed()[0]
        if isinstance(model, Adapter):
            module = model.module
            return {
                "id": module.name,
                "created": model.created,
                **common,
                "root": module.path,
                "parent": module.base_model_name or default.name,
                "max_model_len": self._models.info.limits.sequence.max_model_len,
                "status": {"value": default.status},
            }
        return {
            "id": model.name,
            "created": STARTED,
            **common,
            "root": model.name,
            "parent": None,
            "max_model_len": None if model.info is None else model.info.limits.sequence.max_model_len,
            "status": {"value": model.status, "why": model.why},
        }


def _of_anthropic(call: HttpCall) -> bool:
    """Whether Anthropic's client asks, which always says the version of its API."""
    return call.header(b"anthropic-version") is not None


def _anthropic(model: dict[str, Any]) -> dict[str, Any]:
    """A model as Anthropic's API describes it."""
    created = datetime.fromtimestamp(model["created"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"type": "model", "id": model["id"], "display_name": model["id"], "created_at": created}
