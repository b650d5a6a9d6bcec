"""The LoRA adapters of LLM and AsyncLLM."""

from __future__ import annotations

import asyncio
import copy
import re
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jengine.base.errors import InvalidArgument, ModelError
from jengine.base.model_files import read_json
from jengine.core.lora import LoraInfo, LoRARequest
from jengine.core.service_level import one_each
from jengine.engine.limits import Limits
from jengine.engine.operations import ListLoras, LoadLora, Operation, UnloadLora
from jengine.hub.repository import download
from jengine.text.tokenizer import Tokenizer, special_tokens_of

if TYPE_CHECKING:
    from jengine.text.chat_template import ChatTemplate

# one for all prompts, or one each
LoraRequests = LoRARequest | str | Sequence[LoRARequest | str | None] | None
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


class Loras:
    """The adapters of an LLM: `llm.loras`.

    Args:
        do: has the engine do an operation.
    """

    def __init__(self, do: Callable[[Operation[Any]], Any]) -> None:
        self._do, self._loading = do, threading.Lock()

    def load(
        self,
        lora: LoRARequest | str,
        *,
        config: Mapping[str, Any] | None = None,
        tensors: Mapping[str, Any] | None = None,
        load_inplace: bool = False,
    ) -> LoraInfo:
        """Load an adapter while other threads' requests run: into host memory, and onto the devices before
        the first request that uses it. Nothing is compiled.

        Args:
            lora: its name and path; or only its name, with `config` and `tensors`.
            config: the contents of adapter_config.json, such as {"r": 8, "lora_alpha": 16}.
            tensors: numpy or JAX arrays by the names of adapter_model.safetensors. They are copied.
            load_inplace: replace the loaded adapter of this name; running requests keep the old one.

        Raises:
            InvalidArgument: an engine without enable_lora, a name that is in use, or too many adapters.
            ModelError: the adapter does not fit this model; the message names the module.
            EngineDead: as `LLM.generate`.
        """
        info: LoraInfo = self._do(_load(lora, config, tensors, load_inplace=load_inplace))
        return info

    def unload(self, name: str) -> None:
        """Forget an adapter. Requests that use it keep it until they end; later ones are rejected.

        Raises:
            InvalidArgument: no adapter of this name is loaded.
            EngineDead: as `LLM.generate`.
        """
        self._do(UnloadLora(name))

    def list(self) -> Sequence[LoraInfo]:
        """The loaded adapters, in the order in which they were loaded.

        Raises:
            EngineDead: as `LLM.generate`.
        """
        infos: Sequence[LoraInfo] = self._do(ListLoras())
        return infos

    def names(self, lora_request: LoraRequests, count: int) -> Sequence[str | None]:
        """The names of the adapters of `count` prompts. Loads those that are not loaded yet.

        Raises:
            InvalidArgument: neither one nor `count` requests, or as `load`.
        """
        if lora_request is None:
            return [None] * count
        each = _requests(lora_request, count)
        names = [None if lora is None else lora.lora_name for lora in each]
        together = dict.fromkeys(lora for lora in each if lora is not None)
        keep = tuple(lora.lora_name for lora in together)
        if not {*keep} <= self._check(together):
            with self._loading:  # threads may need the same one
                known = self._check(together)
                for lora in together:
                    if lora.lora_name not in known:
                        self._do(_load(lora, None, None, keep=keep))
        return names

    def _check(self, loras: Iterable[LoRARequest]) -> set[str]:
        """The names of the loaded adapters. Raises InvalidArgument if one of these is another one."""
        known = {info.name: info for info in self.list()}
        for lora in loras:
            _check_same(lora, known.get(lora.lora_name))
        return {*known}


class AsyncLoras:
    """The adapters of an AsyncLLM: `llm.loras`.

    Args:
        do: has the engine do an operation.
        limits: the engine's.

    Attributes:
        by_name: adapters that were loaded here. Requests may name these.
    """

    def __init__(self, do: Callable[[Operation[Any]], Awaitable[Any]], limits: Callable[[], Limits]) -> None:
        self._do, self._limits = do, limits
        self.by_name: dict[str, LoraInfo] = {}
        self._loading: dict[str, asyncio.Future[LoraInfo]] = {}

    async def load(
        self,
        lora: LoRARequest | str,
        *,
        config: Mapping[str, Any] | None = None,
        tensors: Mapping[str, Any] | None = None,
        load_inplace: bool = False,
    ) -> LoraInfo:
        """Load an adapter while requests run; see `Loras.load`."""
        info: LoraInfo = await self._do(_load(lora, config, tensors, load_inplace=load_inplace))
        self.by_name[info.name] = info
        return info

    async def unload(self, name: str) -> None:
        """Forget an adapter; see `Loras.unload`."""
        self.by_name.pop(name, None)  # first, since the engine would end later requests with an error
        await self._do(UnloadLora(name))

    async def list(self) -> Sequence[LoraInfo]:
        """The loaded adapters; see `Loras.list`."""
        infos: Sequence[LoraInfo] = await self._do(ListLoras())
        return infos

    async def require(self, lora_request: LoRARequest | str | None) -> None:
        """Loads the adapter of a request, unless it is loaded. Raises as `load`."""
        lora = LoRARequest(lora_request) if isinstance(lora_request, str) else lora_request
        if lora is None or lora.lora_name in self.by_name:
            return
        if lora.lora_name not in self._loading:  # several requests may name it at the same time
            earlier = [task for task in self._loading.values() if not task.done()]
            self._loading[lora.lora_name] = asyncio.ensure_future(self._load(lora, earlier))
        try:
            await asyncio.shield(self._loading[lora.lora_name])
        finally:
            if (task := self._loading.get(lora.lora_name)) is not None and task.done():
                del self._loading[lora.lora_name]

    async def _load(self, lora: LoRARequest, earlier: Sequence[asyncio.Future[LoraInfo]]) -> LoraInfo:
        if earlier:  # under max_cpu_loras, an adapter makes room only once it is loaded
            await asyncio.wait(earlier)
        info: LoraInfo = await self._do(_load(lora, None, None, keep=()))
        self.by_name = {adapter.name: adapter for adapter in await self.list()}
        return info

    def name(self, lora_request: LoRARequest | str | None) -> str | None:
        """The name of a request's adapter. Raises InvalidArgument if it is not loaded."""
        if lora_request is None:
            return None
        [lora] = _requests(lora_request, 1)
        assert lora is not None
        self._limits().require_lora("lora_request", lora.lora_name)
        if lora.lora_name not in self.by_name:
            raise InvalidArgument("lora_request", lora.lora_name, "is not loaded; loras.load loads it")
        _check_same(lora, self.by_name[lora.lora_name])
        return lora.lora_name


def _requests(requests: LoraRequests, count: int) -> list[LoRARequest | None]:
    """One adapter, or None, for each of `count` prompts. Text is the name of a loaded one.

    Raises:
        InvalidArgument: neither one nor `count` of them, or not a LoRARequest.
    """
    each = [
        LoRARequest(request) if isinstance(request, str) else request
        for request in one_each("lora_request", requests, count)
    ]
    for request in each:
        if not isinstance(request, LoRARequest | None):
            raise InvalidArgument(
                "lora_request", request, "must be a LoRARequest, or the name of a loaded adapter"
            )
    return each


def _check_same(lora: LoRARequest, info: LoraInfo | None) -> None:
    """Raises InvalidArgument if the adapter that is loaded under this name comes from another request."""
    if lora.lora_path and info and (lora.lora_path, lora.lora_int_id) != (info.path, info.lora_int_id):
        limit = (
            f"an adapter of this name is loaded, with lora_int_id={info.lora_int_id} and"
            f" lora_path={info.path!r}; loras.load(..., load_inplace=True) replaces it"
        )
        raise InvalidArgument("lora_request", lora.lora_name, limit)


def _load(
    lora: LoRARequest | str,
    config: Mapping[str, Any] | None,
    tensors: Mapping[str, Any] | None,
    *,
    load_inplace: bool = False,
    keep: tuple[str, ...] | None = None,
) -> LoadLora:
    """The operation for these arguments of Loras.load. Raises InvalidArgument if they do not fit."""
    [request] = _requests(lora, 1)
    assert request is not None
    if (config is None) != (tensors is None):
        raise InvalidArgument("tensors", type(tensors).__name__, "config and tensors go together")
    if config is None or tensors is None:
        if not request.lora_path:
            raise InvalidArgument("lora_request", request.lora_name, "is not loaded, and has no lora_path")
        return LoadLora(
            request.lora_name,
            request.lora_path,
            load_inplace=load_inplace,
            keep=keep,
            lora_int_id=request.lora_int_id,
        )
    from safetensors.numpy import save  # imported here, since few callers hand arrays in

    return LoadLora(
        request.lora_name,
        request.lora_path,
        config=dict(config),
        tensors=save({name: _float32(array) for name, array in tensors.items()}),
        load_inplace=load_inplace,
    )


def _float32(array: Any) -> np.ndarray:
    """Any array, such as one of JAX on a device, in host memory."""
    return np.ascontiguousarray(np.asarray(array), np.float32)


ADDED_TOKENS: dict[str, Callable[[Any], list[tuple[Any, Any]]]] = {  # by file: how they are listed
    "tokenizer.json": lambda file: [
        (token["content"], token["id"]) for token in file.get("added_tokens") or ()
    ],
    "tokenizer_config.json": lambda file: [
        (token["content"], number) for number, token in (file.get("added_tokens_decoder") or {}).items()
    ],
    "added_tokens.json": lambda file: [*file.items()],
}
FILES = ("adapter_model.safetensors", "*.json", "*.jinja")  # of an adapter: tensors, configuration, tokenizer


def find_lora(path: str) -> Path:
    """The absolute folder of an adapter: a folder, or a hub id, whose files are downloaded unless they are
    cached.

    Raises:
        ModelError: there is no such folder, or it cannot be downloaded.
    """
    try:
        folder = Path(path).expanduser()
        if path and folder.is_dir():
            return folder.resolve()
    except (OSError, ValueError, RuntimeError) as wrong:  # a NUL, an unknown user, links in a circle
        raise ModelError(f"cannot be read: {wrong}", file=path) from None
    if HUB_ID.fullmatch(path) is None:
        raise ModelError("there is no such folder; a hub id has the form owner/name", file=path)
    return download(path, None, FILES, "*/*").resolve()


def lora_tokenizer(tokenizer: Tokenizer, folder: Path) -> Tokenizer:
    """The tokenizer for conversations with an adapter: the model's, with the adapter's chat templates if its
    folder has others than the model's. These may use its special tokens.

    Raises:
        ModelError: a file cannot be read, or the adapter has tokens that the model's tokenizer lacks.
    """
    from jengine.text.chat_template import load_chat_templates  # imported here, since only chats need jinja2

    for token, number, file in _added_tokens(folder):
        known = tokenizer.backend.token_to_id(token)
        if known != number:
            there = "the model's tokenizer lacks it" if known is None else f"it is {known} for the model"
            raise ModelError(f"has the added token {token!r} with id {number}, but {there}", file=file)
    templates = load_chat_templates(folder, {**tokenizer.special_tokens, **special_tokens_of(folder)})
    plain = Tokenizer(tokenizer.backend, tokenizer.special_tokens, tokenizer.folder)  # without chat_template
    if not templates or _meanings(templates) == _meanings(plain.chat_templates):
        return tokenizer
    copied = copy.copy(tokenizer)
    copied.chat_templates = templates
    return copied


def _meanings(templates: Mapping[str, ChatTemplate]) -> dict[str, tuple[str, dict[str, str]]]:
    """All that the templates' results depend on: sources, and the special tokens that these mention."""
    return {
        name: (
            template.source,
            {kind: token for kind, token in template.special_tokens.items() if kind in template.names},
        )
        for name, template in templates.items()
    }


def _added_tokens(folder: Path) -> Iterator[tuple[str, int, Path]]:
    """Tokens beyond the vocabulary, their ids, and the file that has each."""
    for name, listed in ADDED_TOKENS.items():
        file = folder / name
        if not file.is_file():
            continue
        try:
            pairs = [(str(text), int(number)) for text, number in listed(read_json(file))]
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as wrong:
            raise ModelError(f"its added tokens cannot be read: {wrong!r}", file=file) from None
        yield from ((text, number, file) for text, number in pairs)
