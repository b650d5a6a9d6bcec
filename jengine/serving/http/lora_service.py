"""/v1/load_lora_adapter and /v1/unload_lora_adapter, as in vLLM."""

from __future__ import annotations

from typing import Any

from jengine import InvalidArgument
from jengine.serving.calls.named_model import no_model
from jengine.serving.config import ServerConfig
from jengine.serving.http.bodies import LOAD_LORA, UNLOAD_LORA
from jengine.serving.http.calls import HttpCall
from jengine.serving.http.endpoint import check_administrator
from jengine.serving.http.service import HttpService
from jengine.serving.lora_modules import LoraModule
from jengine.serving.requests.lora_changes import LoraChanges
from jengine.serving.requests.service import Shared

TEXT = b"text/plain; charset=utf-8"


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
