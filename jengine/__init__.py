"""An LLM inference engine in which no request waits for a compilation.

Importing this package has no side effects. Names are loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from jengine.version import __version__

if TYPE_CHECKING:
    from jengine.api.async_llm import AsyncLLM
    from jengine.api.backend import Backend, EngineThread, Steps, Updates, run_engine, run_operation
    from jengine.api.chat import chat_prompt, chat_tokens, own_template, rendered_chat
    from jengine.api.embeddings import (
        EmbeddingOutput,
        EmbeddingRequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from jengine.api.forward import Forward
    from jengine.api.image_prompts import (
        GivenImage,
        given_images,
        image_marker,
        image_reader,
        images_apart,
        with_parts,
    )
    from jengine.api.llm import LLM
    from jengine.api.lora_text import find_lora, lora_tokenizer
    from jengine.api.prompts import PreparedPrompt, TextPrompt, TokensPrompt, params_of_samples
    from jengine.api.request_handle import OutputKind, RequestHandle
    from jengine.api.scoring import Judgement, Scoring, judging_text, scoring_of
    from jengine.api.script_tokenizer import ScriptTokenizer
    from jengine.base.errors import (
        EngineDead,
        InvalidArgument,
        JengineError,
        ModelError,
        OutOfMemory,
        PromptTooLong,
    )
    from jengine.base.host_memory import available_memory
    from jengine.base.interrupts import uninterrupted
    from jengine.core.beam_outputs import BeamSearchOutput, BeamSearchSequence, GenerationParams
    from jengine.core.beam_params import BeamSearchParams
    from jengine.core.config import EngineConfig
    from jengine.core.images import CutImage, ImagePart, PromptImages
    from jengine.core.lora import LoraInfo, LoraLimits, LoRARequest
    from jengine.core.pooling import Embedder, PoolingParams, Reranker
    from jengine.core.request import (
        CompletionOutput,
        FinishReason,
        Logprob,
        Request,
        RequestOutput,
        SamplingParams,
        TokenMask,
        check_cache_salt,
        check_entries,
    )
    from jengine.core.scheduling_options import StrategyName
    from jengine.core.service_level import MAX_CLIENT
    from jengine.core.structured_outputs import StructuredOutputs
    from jengine.core.updates import (
        Beam,
        BeamsFound,
        Ended,
        Load,
        LoraLoad,
        Pooled,
        PromptScores,
        StoreLoad,
        TokenLogprobs,
        TokenUpdate,
        Update,
    )
    from jengine.engine.limits import Limits
    from jengine.engine.operations import (
        GetTrace,
        ListLoras,
        LoadLora,
        Operation,
        ResetPrefixCache,
        SetStrategy,
        UnloadLora,
        decode_operation,
    )
    from jengine.engine.start import Started, follow, start_engine
    from jengine.fleet.back_off import BackOff
    from jengine.fleet.fleet import Fleet
    from jengine.insight.explanations.explain import Explanation, Finding, explain
    from jengine.insight.profiling.capture import capture_process, read_profiles
    from jengine.insight.profiling.data import Profile, ProfileOptions
    from jengine.insight.recording.records import EngineFacts
    from jengine.insight.recording.totals import StepTotals
    from jengine.insight.recording.trace import Readers, Trace
    from jengine.scheduling.forecasts.forecast import Prediction
    from jengine.scheduling.requests.sequence_limits import SequenceLimits
    from jengine.text.call_grammars import calls_or_text
    from jengine.text.chat_template import ChatTemplate
    from jengine.text.constraints import after_thought, forced_calls, object_schema
    from jengine.text.grammars import check_structure, probe_structure, shown_value
    from jengine.text.masks import make_masks
    from jengine.text.patterns import unknown_patterns
    from jengine.text.thinking import bound_thinking, can_bound
    from jengine.text.tokenizer import Tokenizer
    from jengine.vision.images import MOST_IMAGE_BYTES
    from jengine.vision.reader import ImageReader

__all__ = [
    "LLM",
    "MAX_CLIENT",
    "MOST_IMAGE_BYTES",
    "AsyncLLM",
    "BackOff",
    "Backend",
    "Beam",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "BeamsFound",
    "ChatTemplate",
    "CompletionOutput",
    "CutImage",
    "Embedder",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "Ended",
    "EngineConfig",
    "EngineDead",
    "EngineFacts",
    "EngineThread",
    "Explanation",
    "Finding",
    "FinishReason",
    "Fleet",
    "Forward",
    "GenerationParams",
    "GetTrace",
    "GivenImage",
    "ImagePart",
    "ImageReader",
    "InvalidArgument",
    "JengineError",
    "Judgement",
    "Limits",
    "ListLoras",
    "LoRARequest",
    "Load",
    "LoadLora",
    "Logprob",
    "LoraInfo",
    "LoraLimits",
    "LoraLoad",
    "ModelError",
    "Operation",
    "OutOfMemory",
    "OutputKind",
    "Pooled",
    "PoolingParams",
    "Prediction",
    "PreparedPrompt",
    "Profile",
    "ProfileOptions",
    "PromptImages",
    "PromptScores",
    "PromptTooLong",
    "Readers",
    "Request",
    "RequestHandle",
    "RequestOutput",
    "Reranker",
    "ResetPrefixCache",
    "SamplingParams",
    "Scoring",
    "ScoringOutput",
    "ScoringRequestOutput",
    "ScriptTokenizer",
    "SequenceLimits",
    "SetStrategy",
    "Started",
    "StepTotals",
    "Steps",
    "StoreLoad",
    "StrategyName",
    "StructuredOutputs",
    "TextPrompt",
    "TokenLogprobs",
    "TokenMask",
    "TokenUpdate",
    "Tokenizer",
    "TokensPrompt",
    "Trace",
    "UnloadLora",
    "Update",
    "Updates",
    "__version__",
    "after_thought",
    "available_memory",
    "bound_thinking",
    "calls_or_text",
    "can_bound",
    "capture_process",
    "chat_prompt",
    "chat_tokens",
    "check_cache_salt",
    "check_entries",
    "check_structure",
    "decode_operation",
    "explain",
    "find_lora",
    "follow",
    "forced_calls",
    "given_images",
    "image_marker",
    "image_reader",
    "images_apart",
    "judging_text",
    "lora_tokenizer",
    "make_masks",
    "object_schema",
    "own_template",
    "params_of_samples",
    "probe_structure",
    "read_profiles",
    "rendered_chat",
    "run_engine",
    "run_operation",
    "scoring_of",
    "shown_value",
    "start_engine",
    "uninterrupted",
    "unknown_patterns",
    "with_parts",
]

_MODULES = {
    "jengine.api.llm": ("LLM",),
    "jengine.api.forward": ("Forward",),
    "jengine.api.lora_text": ("find_lora", "lora_tokenizer"),
    "jengine.api.async_llm": ("AsyncLLM",),
    "jengine.api.backend": ("Backend", "EngineThread", "Steps", "Updates", "run_engine", "run_operation"),
    "jengine.core.beam_params": ("BeamSearchParams",),
    "jengine.core.beam_outputs": ("BeamSearchOutput", "BeamSearchSequence", "GenerationParams"),
    "jengine.api.chat": ("chat_prompt", "chat_tokens", "own_template", "rendered_chat"),
    "jengine.core.config": ("EngineConfig",),
    "jengine.api.embeddings": (
        "EmbeddingOutput",
        "EmbeddingRequestOutput",
        "ScoringOutput",
        "ScoringRequestOutput",
    ),
    "jengine.base.errors": (
        "EngineDead",
        "InvalidArgument",
        "JengineError",
        "ModelError",
        "OutOfMemory",
        "PromptTooLong",
    ),
    "jengine.insight.explanations.explain": ("Explanation", "Finding", "explain"),
    "jengine.base.host_memory": ("available_memory",),
    "jengine.base.interrupts": ("uninterrupted",),
    "jengine.engine.limits": ("Limits",),
    "jengine.engine.operations": (
        "GetTrace",
        "ListLoras",
        "LoadLora",
        "Operation",
        "ResetPrefixCache",
        "SetStrategy",
        "UnloadLora",
        "decode_operation",
    ),
    "jengine.insight.recording.records": ("EngineFacts",),
    "jengine.insight.recording.totals": ("StepTotals",),
    "jengine.insight.recording.trace": ("Readers", "Trace"),
    "jengine.api.image_prompts": (
        "GivenImage",
        "given_images",
        "image_marker",
        "image_reader",
        "images_apart",
        "with_parts",
    ),
    "jengine.core.images": ("CutImage", "ImagePart", "PromptImages"),
    "jengine.vision.images": ("MOST_IMAGE_BYTES",),
    "jengine.vision.reader": ("ImageReader",),
    "jengine.core.lora": ("LoRARequest", "LoraInfo", "LoraLimits"),
    "jengine.core.pooling": ("Embedder", "PoolingParams", "Reranker"),
    "jengine.insight.profiling.capture": ("capture_process", "read_profiles"),
    "jengine.insight.profiling.data": ("Profile", "ProfileOptions"),
    "jengine.api.prompts": ("PreparedPrompt", "TextPrompt", "TokensPrompt", "params_of_samples"),
    "jengine.core.request": (
        "CompletionOutput",
        "FinishReason",
        "Logprob",
        "Request",
        "RequestOutput",
        "SamplingParams",
        "TokenMask",
        "check_cache_salt",
        "check_entries",
    ),
    "jengine.api.request_handle": ("OutputKind", "RequestHandle"),
    "jengine.api.scoring": ("Judgement", "Scoring", "judging_text", "scoring_of"),
    "jengine.api.script_tokenizer": ("ScriptTokenizer",),
    "jengine.scheduling.forecasts.forecast": ("Prediction",),
    "jengine.core.scheduling_options": ("StrategyName",),
    "jengine.scheduling.requests.sequence_limits": ("SequenceLimits",),
    "jengine.core.service_level": ("MAX_CLIENT",),
    "jengine.engine.start": ("Started", "follow", "start_engine"),
    "jengine.fleet.back_off": ("BackOff",),
    "jengine.fleet.fleet": ("Fleet",),
    "jengine.text.call_grammars": ("calls_or_text",),
    "jengine.text.constraints": ("after_thought", "forced_calls", "object_schema"),
    "jengine.text.grammars": ("check_structure", "probe_structure", "shown_value"),
    "jengine.text.masks": ("make_masks",),
    "jengine.text.thinking": ("bound_thinking", "can_bound"),
    "jengine.text.chat_template": ("ChatTemplate",),
    "jengine.text.patterns": ("unknown_patterns",),
    "jengine.text.tokenizer": ("Tokenizer",),
    "jengine.core.structured_outputs": ("StructuredOutputs",),
    "jengine.core.updates": (
        "Beam",
        "BeamsFound",
        "Ended",
        "Load",
        "LoraLoad",
        "Pooled",
        "PromptScores",
        "StoreLoad",
        "TokenLogprobs",
        "TokenUpdate",
        "Update",
    ),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}
# vLLM's names
_ALIASES = {"AsyncEngineArgs": "EngineConfig", "AsyncLLMEngine": "AsyncLLM", "EngineArgs": "EngineConfig"}


def __getattr__(name: str) -> object:
    own = _ALIASES.get(name, name)
    if own not in _HOME:
        raise _missing(name)
    value = globals()[name] = getattr(import_module(_HOME[own]), own)
    return value


def _missing(name: str) -> Exception:
    """An ImportError for names of vLLM, since `from jengine import ...` hides the message of an
    AttributeError.
    """
    from jengine.vllm.names import OF_PACKAGE, missing

    text = missing(__name__, name, OF_PACKAGE)
    return ImportError(text, name=__name__) if name in OF_PACKAGE else AttributeError(text)


def __dir__() -> list[str]:
    return sorted(__all__)
