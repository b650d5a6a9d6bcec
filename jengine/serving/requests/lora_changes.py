"""Loads and unloads adapters for administrators, over any protocol: from folders below lora_dir, and by hub
ids if allowed.
"""

from __future__ import annotations

import asyncio
import logging
import re
from pathlib import Path

import grpc

from jengine import InvalidArgument, ModelError
from jengine.serving.calls.call import Call
from jengine.serving.calls.errors import Refusal, not_found
from jengine.serving.calls.model_provider import Adapter, ServedModels
from jengine.serving.calls.named_model import no_model
from jengine.serving.config import ServerConfig
from jengine.serving.guards.admission import check_admin, client_of
from jengine.serving.options import LoraModule

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
MOST_FILES = 1000  # in an adapter's folder
TEXTS, MOST_TEXT = (".json", ".jinja"), 2**27  # files that are read as a whole, and their bytes


def check_folder(config: ServerConfig) -> None:
    """Raises InvalidArgument if lora_dir is no folder."""
    try:
        there = config.lora_dir is None or Path(config.lora_dir).expanduser().is_dir()
    except (OSError, ValueError, RuntimeError):  # a NUL, or an unknown user
        there = False
    if not there:
        raise InvalidArgument("lora_dir", str(config.lora_dir), "there is no such folder")


def allowed_path(path: str, config: ServerConfig) -> str:
    """The absolute path of an adapter's folder, or its hub id.

    Args:
        path: relative to lora_dir, or absolute; or a hub id.

    Raises:
        InvalidArgument: the folder, or a file in it, is not below lora_dir, also through links; or hub ids
            are not allowed.
        Refusal: there is no such folder.
    """
    is_id = HUB_ID.fullmatch(path) is not None
    if config.lora_dir is not None:
        root = Path(config.lora_dir).expanduser().resolve()
        if (folder := folder_below(root, path, "lora_path", "lora_dir")) is not None:
            return str(folder)
    if not is_id:
        raise not_found("adapter", path, f"lora_path={path[:200]!r}: there is no such folder in lora_dir")
    if not config.allow_lora_hub:
        raise InvalidArgument(
            "lora_path",
            path,
            "is no folder in lora_dir, and this server loads none from the hub (allow_lora_hub)",
        )
    if Path(path).exists():  # in the server's working directory, where a folder would be found first
        raise InvalidArgument("lora_path", path, "is a hub id, but also a path on the server")
    return path


def folder_below(root: Path, path: str, field: str, option: str) -> Path | None:
    """A folder of which every file may be read for a client; None if it does not exist.

    Args:
        root: the absolute folder in which clients may name others.
        field: of the request, with the path.
        option: of the server, with the root.

    Raises:
        InvalidArgument: the folder or a file in it lies elsewhere, also through links, or a file is none with
            an end, or too large.
    """
    try:
        folder = (root / path).resolve()
        if not folder.is_relative_to(root):
            raise InvalidArgument(field, path, f"must be below {option}")
        if not folder.is_dir():
            return None
        for count, file in enumerate(folder.rglob("*")):
            if count >= MOST_FILES:
                raise InvalidArgument(field, path, f"has more than {MOST_FILES} files")
            if (why := _why_not(file, root, option)) is not None:
                raise InvalidArgument(field, path, f"{file.relative_to(folder)} {why}")
    except (OSError, ValueError, RuntimeError) as wrong:  # too long, NUL, no UTF-8, links in a circle
        if isinstance(wrong, InvalidArgument):
            raise
        raise InvalidArgument(field, path, f"cannot be used: {type(wrong).__name__}") from None
    return folder


def _why_not(file: Path, root: Path, option: str) -> str | None:
    """Why a file may not be read."""
    if not file.resolve().is_relative_to(root):
        return f"is a link to a place outside of {option}"
    if file.is_dir():
        return None
    if not file.is_file():  # a pipe blocks its reader for good
        return "is no regular file"
    if file.suffix in TEXTS and (size := file.stat().st_size) > MOST_TEXT:
        return f"has {size} bytes; at most {MOST_TEXT}"
    return None


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
        if not self._config.changes_loras:
            why = "this server does not load or unload adapters while it runs"
            message = f"{why}: start it with lora_dir (--lora-dir)"
            raise Refusal(grpc.StatusCode.PERMISSION_DENIED, message, cause="lora_dir")

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
