"""Small services over HTTP: the models, tokenizing, and loading and unloading adapters, as in vLLM."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

import msgspec

from jengine import InvalidArgument
from jengine.serving.calls.model_provider import Adapter, ListedModel
from jengine.serving.calls.named_model import listed_model, no_model
from jengine.serving.calls.portions import encoded
from jengine.serving.config import ServerConfig
from jengine.serving.guards.admission import client_of
from jengine.serving.http.bodies import DETOKENIZE, LOAD_LORA, TOKENIZE, UNLOAD_LORA
from jengine.serving.http.calls import HttpCall
from jengine.serving.http.endpoint import check_administrator, while_connected
from jengine.serving.http.service import TEMPLATE_OPTIONS, HttpService, check_conversation
from jengine.serving.options import LoraModule
from jengine.serving.requests.lora_changes import LoraChanges
from jengine.serving.requests.service import Shared, check_ids, check_vocabulary

OPTIONS = (*TEMPLATE_OPTIONS, "tools")
TEXT = b"text/plain; charset=utf-8"


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


class LoraService(HttpService):
    """For administrators."""

    def __init__(self, shared: Shared, most_bytes: int, config: ServerConfig) -> None:
        super().__init__(shared, most_bytes)
        self._changes = LoraChanges(config, shared.models)

    async def load(self, call: HttpCall) -> None:
        check_administrator(call)
        self._changes.check(call)
        json_body, _ = await self._json(call)
        body = LOAD_LORA.read(json_body)
        name, path = (_text(body.fields, field) for field in ("lora_name", "lora_path"))
        await self._changes.load(call, LoraModule(name, path), body.get("load_inplace", False))
        await self._success(call, name, "added")

    async def unload(self, call: HttpCall) -> None:
        check_administrator(call)
        self._changes.check(call)
        json_body, _ = await self._json(call)
        body = UNLOAD_LORA.read(json_body)
        name, number = body.get("lora_name", ""), body.get("lora_int_id")
        if number is None:
            name = _text(body.fields, "lora_name")
        else:
            named = [adapter.module.name for adapter in self._models.adapters if adapter.number == number]
            if not named:
                raise no_model(name or str(number), self._models)
            if name not in ("", *named):
                raise InvalidArgument(
                    "lora_int_id", number, f"is the number of {named[0]!r}, not of {name!r}"
                )
            [name] = named
        await self._changes.unload(call, name)
        await self._success(call, name, "removed")

    async def _success(self, call: HttpCall, name: str, action: str) -> None:
        text = f"Success: LoRA adapter '{name}' {action} successfully."
        await call.answer(200, text.encode("utf-8", "replace"), kind=TEXT)


def _text(fields: dict[str, Any], name: str) -> str:
    if not fields.get(name):
        raise InvalidArgument(name, fields.get(name), "must be given")
    return str(fields[name])
