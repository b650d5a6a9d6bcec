"""The draft model or head of an engine, and what it must have in common with the model that it drafts for."""

from __future__ import annotations

import dataclasses
from typing import Any

from jengine.base.errors import InvalidArgument
from jengine.core.speculation import NAME
from jengine.execution.spec import ExecutionSpec
from jengine.models import DRAFT_HEADS, Model, build
from jengine.models.cache import apart, paged
from jengine.models.config import ModelConfig
from jengine.models.draft_heads import Eagle3Head


def build_draft(draft: ModelConfig, spec: ExecutionSpec) -> Model:
    """Declares the draft model or head. Its layers keep keys and values on the pages of the model's first
    group.

    Raises:
        InvalidArgument: it cannot draft for the model of the spec; says why.
        ModelError: it is not supported.
    """
    head, group, why = draft.family in DRAFT_HEADS, paged(spec.groups)[0], None
    if group.window is not None:
        why = f"not for models whose layers all have a window, here of {group.window} tokens"
    else:
        why = _head_differs(draft, spec.model) if head else _model_differs(draft, spec)
    if why is None:
        built = _build(draft, spec)
        cache_group = apart(built.entries)
        if cache_group is not None:
            return dataclasses.replace(built, groups=(cache_group,))
        why = "its layers keep recurrent states, or keys and values of several sizes"
    field, value = ("method", "mtp") if draft.family.endswith("_mtp") else ("model", draft.family)
    raise InvalidArgument(f"{NAME}.{field}", value, why)


def _build(draft: ModelConfig, spec: ExecutionSpec) -> Model:
    """An MTP head's weights are quantized as the model's are; others come as they are stored."""
    model, arguments = spec.model, (spec.model.dtype, spec.max_model_len)
    over: dict[str, Any] = {"shards": model.config.shards, "expert_shards": model.config.expert_shards}
    if not draft.family.endswith("_mtp"):
        return build(draft, *arguments, None, **over).sharing(model)
    built = build(draft, *arguments, model.quantization, group_size=model.group_size, **over)
    return built.sharing(model)


def _model_differs(draft: ModelConfig, spec: ExecutionSpec) -> str | None:
    """Why a model cannot draft, or None."""
    model = spec.model.config
    if draft.vocab_size != model.vocab_size:
        return f"has {draft.vocab_size} tokens in its vocabulary, but the model has {model.vocab_size}"
    if draft.max_position < spec.max_model_len:
        return f"has {draft.max_position} positions, fewer than max_model_len={spec.max_model_len}"
    return None


def _head_differs(head: ModelConfig, model: Model) -> str | None:
    """Why a head cannot draft, or None. Beyond its positions its drafts are worse, which is no reason."""
    part, config = head.find(Eagle3Head), model.config
    if part is None:
        return None
    if part.vocab_size != config.vocab_size:
        return f"is for {part.vocab_size} tokens in the vocabulary, but the model has {config.vocab_size}"
    if part.hidden_size != config.hidden_size:
        return f"is for hidden states of {part.hidden_size}, but the model's have {config.hidden_size}"
    if not part.own_embedding and head.hidden_size != config.hidden_size:
        return f"has no embedding, and hidden states of {head.hidden_size}, not {config.hidden_size}"
    if not all(0 <= layer <= config.num_layers for layer in part.before):
        return f"reads layers {list(part.before)}, but the model has {config.num_layers}"
    if not model.gives_states:
        return f"not for models of type {config.family}, whose layers have other inputs"
    return None


def with_draft(spec: ExecutionSpec) -> list[ExecutionSpec]:
    """The spec and, if there is a draft model or head, that of this."""
    return [spec] if spec.drafting is None else [spec, spec.drafting]
