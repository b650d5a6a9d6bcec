"""Loads and unloads adapters for administrators, over any protocol."""

from __future__ import annotations

import asyncio
import logging

import grpc

from jengine import InvalidArgument, ModelError
from jengine.serving.calls.call import Call
from jengine.serving.calls.errors import Refusal
from jengine.serving.calls.model_provider import Adapter, ServedModels
from jengine.serving.calls.named_model import no_model
from jengine.serving.config import ServerConfig
from jengine.serving.guards.admission import client_of
from jengine.serving.guards.bounds import check_admin
from jengine.serving.guards.lora_folder import allowed_path, check_changes, check_folder
from jengine.serving.options import LoraModule

log = logging.getLogger("jengine.serving")


class LoraChanges:
    """Every method raises Refusal unless the caller is an administrator and the server allows changes.

    Raises:
        InvalidArgument: lora_dir is no folder.
    """

    def __init__(self, config: ServerConfig, models: ServedModels) -> None:
        check_folder(config)
        self._config, self._models = config, models

    def check(self, call: Call) -> None:
        """Before anything else is read."""
        check_admin(call.peer())
        check_changes(self._config)

    async def load(self, call: Call, module: LoraModule, load_inplace: bool) -> Adapter:
        """Loads an adapter; the path is the client's.

        Raises:
            InvalidArgument: a path that is not allowed, a name in use, or too many adapters.
            Refusal: there is no such folder, or the adapter cannot be loaded; names the file and the module.
            EngineDead: no engine runs.
        """
        self.check(call)
        path = await asyncio.to_thread(allowed_path, module.path, self._config)
        served, llm = self._models.info.name, self._models.llm
        if module.name in [model.name for model in self._models.listed()[1:]]:
            raise InvalidArgument("lora_name", module.name, "is the name of a model of this server")
        try:
            adapter = await self._models.adapters.load(
                llm, module, served, path=path, load_inplace=load_inplace
            )
        except ModelError as wrong:
            raise Refusal(
                grpc.StatusCode.FAILED_PRECONDITION, str(wrong), cause="adapter", field="lora_path"
            ) from None
        log.info("%s has loaded the adapter %s from %s", client_of(call), module.name, path)
        return adapter

    async def unload(self, call: Call, name: str) -> None:
        """Forgets an adapter; its unfinished requests keep it.

        Raises:
            Refusal: there is no such adapter.
            EngineDead: no engine runs.
        """
        self.check(call)
        if self._models.adapters.get(name) is None:
            raise no_model(name, self._models)
        await self._models.adapters.unload(self._models.llm, name)
        log.info("%s has unloaded the adapter %s", client_of(call), name)
