"""Functions that create the engines that an engine process can run, named in `wire.Configure`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from jengine import EngineConfig, InvalidArgument, SamplingParams, StructuredOutputs, Tokenizer
from jengine.serving.calls.model_provider import EngineInfo, EventSource, PagesInfo

if TYPE_CHECKING:
    from jengine.spi import AnyEngine  # imports jax, which the mock does not need


class WarmEngine(NamedTuple):
    """A warmed-up engine, and the tokenizer for its requests' masks. Without one there are no masks."""

    engine: AnyEngine
    tokenizer: Tokenizer | None
    info: EngineInfo


def model_engine(report: Callable[[str, str, int, int], None] | None = None, **options: Any) -> WarmEngine:
    """An engine with a model; the options are EngineConfig's. Progress bars are shown if stderr is a
    terminal.

    Args:
        report: gets the start's progress; see jengine.base.progress.Report.

    Raises:
        InvalidArgument, ModelError, OutOfMemory: as jengine.start_engine.
    """
    from jengine.spi import start_engine  # imports jax, which the mock does not need

    config = EngineConfig(**options)
    if config.enable_prompt_embeds:
        limit = "must be False: requests give text, token ids and images; LLM and AsyncLLM take embeddings"
        raise InvalidArgument("enable_prompt_embeds", True, limit)
    engine, started = start_engine(config, progress=report or True)
    tokenizer, events = prepared(started.require_tokenizer()), config.page_events
    info = EngineInfo(
        tokenizer_folder=str(started.tokenizer_folder),
        image_folder=None if tokenizer.images is None else str(started.folder),
        max_images=config.max_images,
        image_rows=config.image_rows,
        image_processing=config.image_processing,
        chat_template=None if config.chat_template is None else tokenizer.chat_templates["default"].source,
        dtype=started.dtype,
        quantization=started.quantization,
        devices=started.devices,
        kernels=started.kernels,
        advice=started.advice,
        mesh=_mesh(config),
        programs_compiled=started.programs_compiled,
        programs_loaded=started.programs_loaded,
        sampling_defaults=changed_fields(started.default_sampling_params),
        longest_step=started.longest_step,
        stream_interval=config.stream_interval,
        pages=_pages(config, None if engine.pages is None else engine.pages.address),
        page_events=None
        if events is None
        else EventSource(events.endpoint, events.replay_endpoint, events.topic),
    )
    return WarmEngine(engine, tokenizer, info)


def prepared(tokenizer: Tokenizer) -> Tokenizer:
    """Prepares llguidance's view of the vocabulary.

    For a large vocabulary this takes a second, which would delay the first request for structured output, and
    all others.
    """
    from jengine.spi import make_masks

    with contextlib.suppress(Exception):  # a tokenizer that llguidance cannot use still serves other requests
        make_masks(SamplingParams(structured_outputs=StructuredOutputs(regex="a")), tokenizer, 1)
    return tokenizer


def _pages(config: EngineConfig, address: str | None) -> PagesInfo:
    transfer = config.kv_transfer
    if transfer is None or transfer.connector != "sockets":
        return PagesInfo()
    return PagesInfo(address, transfer.peers if transfer.loads else (), transfer.engine_id or address)


def changed_fields(params: SamplingParams) -> dict[str, Any]:
    """The fields that differ from SamplingParams' own defaults."""
    plain = dataclasses.asdict(SamplingParams())
    return {name: value for name, value in dataclasses.asdict(params).items() if value != plain[name]}


def _mesh(config: EngineConfig) -> dict[str, int]:
    """Devices by axis."""
    layout = config.layout
    others = {"stage": layout.stages, "data": layout.data}
    return {"tensor": layout.tensor, **{axis: size for axis, size in others.items() if size > 1}}
