"""Folders of adapters for the mock engine, and servers that load them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx

from tests.mocks.mock_engine import shift_of
from tests.serving.conftest import MockServer

SUCCESS = "Success: LoRA adapter '{}' {} successfully."


def write_adapter(folder: Path, *, rank: int = 4, **files: Any) -> Path:
    """An adapter's folder; `files`: by name without suffix, text of a template or an object for JSON."""
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank}))
    for name, content in files.items():
        suffix, text = ("jinja", content) if isinstance(content, str) else ("json", json.dumps(content))
        (folder / f"{name}.{suffix}").write_text(text)
    return folder


def options(folder: Path, **more: Any) -> dict[str, Any]:
    """Of a server that may load adapters of this folder."""
    return {"port": 0, "lora_dir": folder, **more}


def change(server: MockServer, how: str, key: str | None = None, **body: Any) -> httpx.Response:
    """Sends /v1/load_lora_adapter or /v1/unload_lora_adapter."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return httpx.post(f"{server.http}/{how}_lora_adapter", json=body, headers=headers, timeout=60)


def load(server: MockServer, name: str, path: str | None = None, **more: Any) -> None:
    answer = change(server, "load", lora_name=name, lora_path=path or name, **more)
    assert (answer.status_code, answer.text) == (200, SUCCESS.format(name, "added"))


def unload(server: MockServer, name: str) -> None:
    answer = change(server, "unload", lora_name=name)
    assert (answer.status_code, answer.text) == (200, SUCCESS.format(name, "removed"))


def expected(ids: list[int], name: str | None, count: int) -> list[int]:
    """The mock engine's answer with this adapter."""
    return [(ids[i % len(ids)] + shift_of(name)) % 501 for i in range(count)]
