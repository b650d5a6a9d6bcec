"""What trainers need of a server, under the paths that vLLM and SkyRL have for it: for administrators, if the
option rollout_api is set.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import msgspec
from starlette.routing import Route

from jengine import AsyncLLM, InvalidArgument
from jengine.serving.guards.admission import client_of
from jengine.serving.guards.lora_folder import folder_below
from jengine.serving.http.app import Parts, endpoint
from jengine.serving.http.calls import HttpCall, json_object
from jengine.serving.http.endpoint import check_administrator

log = logging.getLogger("jengine.serving")

MOST_BYTES = 2**16  # of a body
Query = dict[str, list[str]]
Answer = Callable[[AsyncLLM, Query], Awaitable[Any]]


class NewWeights(msgspec.Struct, forbid_unknown_fields=True):
    """The body of /update_weights. `path`: a folder in weights_folder."""

    path: str
    version: int | str | None = None
    check_finite: bool = False
    keep_cache: bool = False


def rollout_routes(parts: Parts) -> list[Route]:
    """The routes; none unless rollout_api is set."""
    if not parts.config.rollout_api:
        return []
    folder = parts.config.weights_folder

    def route(method: str, path: str, names: tuple[str, ...], answer: Answer) -> Route:
        async def handle(call: HttpCall) -> None:
            check_administrator(call)
            answered = await answer(parts.shared.models.llm, _query(call, names))
            if method == "POST":
                log.info("%s has called %s", client_of(call), path)
            await call.answer(200, msgspec.json.encode(answered))

        return endpoint(parts, method, path, handle)

    async def update_weights(call: HttpCall) -> None:
        check_administrator(call)
        _query(call, ())
        raw = await call.body(MOST_BYTES)
        json_object(raw)
        try:
            new = msgspec.json.decode(raw, type=NewWeights)
        except msgspec.ValidationError as wrong:
            raise InvalidArgument("body", raw.decode("utf-8", "replace"), str(wrong)) from None
        version = await parts.shared.models.llm.update_weights(
            str(_inside(folder, new.path)),
            new.version,
            check_finite=new.check_finite,
            keep_cache=new.keep_cache,
        )
        log.info("%s has updated the weights to version %s", client_of(call), version)
        await call.answer(200, msgspec.json.encode({"version": version}))

    return [
        route("POST", "/pause", ("mode",), _pause),
        route("POST", "/resume", (), _resume),
        route("GET", "/is_paused", (), _is_paused),
        route("POST", "/sleep", ("level", "mode", "tags"), _sleep),
        route("POST", "/wake_up", ("tags",), _wake_up),
        route("GET", "/is_sleeping", (), _is_sleeping),
        route("POST", "/reset_prefix_cache", (), _reset_prefix_cache),
        endpoint(parts, "POST", "/update_weights", update_weights),
    ]


async def _pause(llm: AsyncLLM, query: Query) -> Any:
    await llm.pause(_one(query, "mode", "abort"))  # type: ignore[arg-type]
    return {"status": "paused"}


async def _resume(llm: AsyncLLM, query: Query) -> Any:
    await llm.resume()
    return {"status": "resumed"}


async def _is_paused(llm: AsyncLLM, query: Query) -> Any:
    return {"is_paused": await llm.is_paused()}


async def _sleep(llm: AsyncLLM, query: Query) -> Any:
    level = _one(query, "level", "1")
    if level not in ("1", "2"):
        raise InvalidArgument("level", level, "must be 1 or 2")
    mode: Any = _one(query, "mode", "abort")
    tags: Any = {"tags": query["tags"]} if "tags" in query else {}
    await llm.sleep(int(level), mode, **tags)
    return {"is_sleeping": True}


async def _wake_up(llm: AsyncLLM, query: Query) -> Any:
    tags: Any = query.get("tags")
    await llm.wake_up(tags)
    return {"is_sleeping": await llm.is_sleeping()}


async def _is_sleeping(llm: AsyncLLM, query: Query) -> Any:
    return {"is_sleeping": await llm.is_sleeping()}


async def _reset_prefix_cache(llm: AsyncLLM, query: Query) -> Any:
    return {"done": await llm.reset_prefix_cache()}


def _query(call: HttpCall, names: tuple[str, ...]) -> Query:
    """The query's values by name.

    Raises:
        InvalidArgument: a name is unknown.
    """
    query = parse_qs(call.scope["query_string"].decode("latin-1"), keep_blank_values=True)
    for name, values in query.items():
        if name not in names:
            limit = f"is unknown here; {', '.join(names)} may be given" if names else "nothing may be given"
            raise InvalidArgument(name, values[0], limit)
    return query


def _one(query: Query, name: str, default: str) -> str:
    values = query.get(name, [default])
    if len(values) > 1:
        raise InvalidArgument(name, values, "must be given once")
    return values[0]


def _inside(folder: str | None, path: str) -> Path:
    """A folder in weights_folder.

    Raises:
        InvalidArgument: there is none, or the path leads out of it.
    """
    if folder is None:
        raise InvalidArgument("path", path, "the server has no weights_folder")
    weights = folder_below(Path(folder).resolve(), path, "path", "weights_folder")
    if weights is None:
        raise InvalidArgument("path", path, "must be a folder in the server's weights_folder")
    return weights
