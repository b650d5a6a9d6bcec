"""The configuration of an engine: plain data, checked once, when it is made."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import Annotated, Any, Self

from jengine.base.errors import InvalidArgument
from jengine.base.options import check_options, readable
from jengine.core.cache_options import CacheOptions, check_cache
from jengine.core.device_options import DeviceOptions, ProgramOptions, check_devices
from jengine.core.image_options import ImageOptions, check_images
from jengine.core.lora import LoraOptions, check_lora
from jengine.core.model_options import ModelOptions, check_model
from jengine.core.scheduling_options import (
    BURST_STEPS,
    WITHOUT_TARGETS,
    SchedulingOptions,
    StepOptions,
    StrategyName,
    check_budget,
    check_scheduling,
)
from jengine.core.speculation import Speculation
from jengine.vllm.flags import add_fields, add_vllm_flags
from jengine.vllm.translate import ENGINE_SETTINGS, LIBRARY_SETTINGS, takes, warn


@takes({**ENGINE_SETTINGS, **LIBRARY_SETTINGS})
@dataclass(frozen=True, kw_only=True)
class EngineConfig(  # the fields of the last base come first
    DeviceOptions,
    ProgramOptions,
    SchedulingOptions,
    StepOptions,
    CacheOptions,
    ImageOptions,
    LoraOptions,
    ModelOptions,
):
    """An engine's options, in groups. None lets the engine choose for the model and the device. vLLM's names
    for options that have another name here, or need none, are accepted too.

    Raises:
        InvalidArgument: naming the option, its value and the limit.
    """

    # off by default in a bare scheduler, automatic in an engine
    speculative_config: Annotated[dict[str, Any] | str | None, readable(Speculation.of)] = "auto"

    @classmethod
    def of(cls, model: str, options: dict[str, Any]) -> EngineConfig:
        """Make a configuration from keyword options. Warns of options of vLLM that have no effect here.

        Raises:
            InvalidArgument: an unknown option, or a value out of range.
        """
        for name in ("mesh", "params"):
            if name in options:
                limit = (
                    "is no option of an engine's process: LLM, AsyncLLM and start_engine take it, in their"
                    " own process"
                )
                raise InvalidArgument(name, type(options[name]).__name__, limit)
        return cls(**{"model": model, **options})

    @staticmethod
    def add_cli_args[P: argparse.ArgumentParser](parser: P) -> P:
        """Add a flag for each option, and vLLM's flags, to a script's parser. Returns the parser.

        Only options that are given, or set by `set_defaults`, become attributes of the parsed arguments.
        """
        add_fields(parser.add_argument_group("engine"), EngineConfig)
        add_vllm_flags(parser, ENGINE_SETTINGS.values(), lambda note: warn([note]))
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """The options among a script's arguments.

        Raises:
            InvalidArgument: a value out of range.
        """
        names = {*cls.__dataclass_fields__, *ENGINE_SETTINGS}
        return cls(**{name: value for name, value in vars(args).items() if name in names})

    def __post_init__(self) -> None:
        check_options(self)
        check_model(self)
        check_images(self)
        check_lora(self)
        check_cache(self)
        check_scheduling(self)
        check_devices(self)
        check_bursts(self)
        if self.max_num_seqs is not None and self.max_num_batched_tokens is not None:
            check_budget(self.max_num_seqs, self.max_num_batched_tokens, self.tile_size)

    @property
    def strategies(self) -> tuple[StrategyName, ...]:
        """Strategies that work with these options: stages predict no times between tokens."""
        return WITHOUT_TARGETS if self.pipeline_parallel_size > 1 else super().strategies

    @property
    def scheduling(self) -> SchedulingOptions:
        """The options as the scheduler takes them. A pipeline drafts nothing."""
        return self if self.pipeline_parallel_size == 1 else replace(self, speculative_config=None)

    @property
    def burst_steps(self) -> int:
        """The number of decode steps in a burst; 1: there are no bursts."""
        single = self.num_scheduler_steps in (None, 1) or self.pipeline_parallel_size > 1
        return 1 if single else BURST_STEPS


def check_bursts(config: EngineConfig) -> None:
    """Raises InvalidArgument if other options rule bursts out."""
    if config.burst_steps == 1:
        return
    steps = config.num_scheduler_steps
    if config.batch_invariant:
        limit = "must be 1 with batch_invariant: a burst is a different program"
        raise InvalidArgument("num_scheduler_steps", steps, limit)
    if config.burst_steps > config.tile_size:
        limit = f"at least {BURST_STEPS} with num_scheduler_steps={steps}"
        raise InvalidArgument("tile_size", config.tile_size, limit)
    if config.draft_tokens:
        limit = "must be 1 with a draft model or head: a burst drafts nothing"
        raise InvalidArgument("num_scheduler_steps", steps, limit)
