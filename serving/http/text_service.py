"""/tokenize, /detokenize and /v1/models."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from openai.pagination import SyncPage

from jengine import InvalidArgument, Tokenizer
from jengine.serving.calls.adapters import Adapter
from jengine.serving.calls.named_model import NamedModel, named_model
from jengine.serving.guards.admission import client_of
from jengine.serving.http import replies
from jengine.serving.http.bodies import DETOKENIZE, TOKENIZE, Body
from jengine.serving.http.calls import HttpCall
from jengine.serving.http.endpoint import while_connected
from jengine.serving.http.service import HttpService, check_conversation

OPTIONS = (
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
    "tools",
)
STARTED = int(time.time())


class TextService(HttpService):
    """Requests that do not need the engine."""

    async def tokenize(self, call: HttpCall) -> None:
        given, size = await self._json(call)
        await while_connected(call, self._tokenize(call, *self._read(TOKENIZE, given, call), size))

    async def _tokenize(self, call: HttpCall, body: Body, model: NamedModel, size: int) -> None:
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
        tokenizer: Tokenizer = model.tokenizer(self._models.llm)
        if "messages" in body.fields:
            options = {name: body.get(name) for name in OPTIONS if name in body.fields}
            prompt = await self._render(
                tokenizer, lambda: (body.get("messages"), options), body.get("chat_template"), size, call
            )
            ids = prompt["prompt_token_ids"]
        else:
            text, special = body.get("prompt"), body.get("add_special_tokens", True)
            ids = await self._text_work.run(client_of(call), size, lambda: tokenizer.encode(text, special))
        answer: dict[str, Any] = {"count": len(ids), "max_model_len": self._max_model_len, "tokens": ids}

        def encoded() -> bytes:
            if body.get("return_token_strs"):
                answer["token_strs"] = [tokenizer.token_text(token) for token in ids]
            return msgspec.json.encode(answer)

        await call.answer(200, await self._text_work.run(client_of(call), size, encoded))

    async def detokenize(self, call: HttpCall) -> None:
        given, size = await self._json(call)
        body, _ = self._read(DETOKENIZE, given, call)
        self._admission.stream(call)
        tokens = body.get("tokens")
        if tokens is None:
            raise InvalidArgument("tokens", None, "must be given")
        self._check_ids("tokens", len(tokens))
        if tokens and not 0 <= min(tokens) <= max(tokens) < 2**32:
            raise InvalidArgument("tokens", tokens, "ids must be in [0, 4294967296)")
        tokenizer = self._models.llm.tokenizer
        text = await self._text_work.run(
            client_of(call), size, lambda: tokenizer.decode_unlocked(tokens, False)
        )
        await call.answer(200, msgspec.json.encode({"prompt": text}))

    async def models(self, call: HttpCall) -> None:
        served = [self._model(), *map(self._model, self._models.adapters)]
        page = SyncPage[replies.ServedModel](data=served, object="list")
        await call.answer(200, replies.text_of(page).encode("utf-8", "replace"))

    async def model(self, call: HttpCall) -> None:
        named = named_model(call.scope["path_params"]["model"], self._models)
        await call.answer(200, replies.text_of(self._model(named.adapter)).encode("utf-8", "replace"))

    def _model(self, adapter: Adapter | None = None) -> replies.ServedModel:
        own = self._models.info.name
        module = None if adapter is None else adapter.module
        return replies.ServedModel(
            id=own if module is None else module.name,
            created=STARTED if adapter is None else adapter.created,
            object="model",
            owned_by="jengine",
            root=own if module is None else module.path,
            parent=None if module is None else module.base_model_name or own,
            max_model_len=self._max_model_len,
        )
