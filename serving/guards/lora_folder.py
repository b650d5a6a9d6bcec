"""Which adapters administrators may load while a server runs: folders below lora_dir, and hub ids if
allowed.
"""

from __future__ import annotations

import re
from pathlib import Path

import grpc

from jengine import InvalidArgument
from jengine.serving.calls.errors import Refusal, not_found
from jengine.serving.config import ServerConfig

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
MOST_FILES = 1000  # in an adapter's folder


def check_folder(config: ServerConfig) -> None:
    """Raises InvalidArgument if lora_dir is no folder."""
    if config.lora_dir is not None and not Path(config.lora_dir).expanduser().is_dir():
        raise InvalidArgument("lora_dir", str(config.lora_dir), "there is no such folder")


def check_changes(config: ServerConfig) -> None:
    """Raises Refusal unless adapters may be loaded and unloaded."""
    if not config.changes_loras:
        raise Refusal(
            grpc.StatusCode.PERMISSION_DENIED,
            "this server does not load or unload adapters while it runs: start it with lora_dir (--lora-dir)",
            cause="lora_dir",
        )


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
        if (folder := _below(root, path)) is not None:
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


def _below(root: Path, path: str) -> Path | None:
    """The folder; None if it does not exist. Raises InvalidArgument if it leads elsewhere."""
    try:
        folder = (root / path).resolve()
        if not folder.is_relative_to(root):
            raise InvalidArgument("lora_path", path, "must be below lora_dir")
        if not folder.is_dir():
            return None
        for count, file in enumerate(folder.rglob("*")):
            if count >= MOST_FILES:
                raise InvalidArgument("lora_path", path, f"has more than {MOST_FILES} files")
            if not file.resolve().is_relative_to(root):
                where = file.relative_to(folder)
                raise InvalidArgument("lora_path", path, f"{where} is a link to a place outside of lora_dir")
    except (OSError, ValueError, RuntimeError) as wrong:  # too long, NUL, no UTF-8, links in a circle
        if isinstance(wrong, InvalidArgument):
            raise
        raise InvalidArgument("lora_path", path, f"cannot be used: {type(wrong).__name__}") from None
    return folder
