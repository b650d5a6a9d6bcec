"""The draft model of an engine, and what it must have in common with the model that it drafts for."""

from __future__ import annotations

import dataclasses

from jengine.base.errors import InvalidArgument
from jengine.core.speculation import NAME
from jengine.execution.spec import ExecutionSpec
from jengine.models import Model, build
from jengine.models.cache import apart, paged
from jengine.models.config import ModelConfig


def build_draft(draft: ModelConfig, spec: ExecutionSpec) -> Model:
    """Declares the draft model. Its layers keep keys and values on the pages of the model's first group.

    Raises:
        InvalidArgument: it cannot draft for the model of the spec; says why.
        ModelError: it is not supported.
    """
    model, group = spec.model.config, paged(spec.groups)[0]
    if group.window is not None:
        why = f"not for models whose layers all have a window, here of {group.window} tokens"
    elif draft.vocab_size != model.vocab_size:
        why = f"has {draft.vocab_size} tokens in its vocabulary, but the model has {model.vocab_size}"
    elif draft.max_position < spec.max_model_len:
        why = f"has {draft.max_position} positions, fewer than max_model_len={spec.max_model_len}"
    else:
        built = build(draft, spec.model.dtype, spec.max_model_len, None, spec.mesh.devices.size)
        own = apart(built.entries)
        if own is not None:
            return dataclasses.replace(built, groups=(own,))
        why = "its layers keep recurrent states, or keys and values of several sizes"
    raise InvalidArgument(f"{NAME}.model", draft.family, why)


def with_draft(spec: ExecutionSpec) -> list[ExecutionSpec]:
    """The spec and, if there is a draft model, that of the draft model."""
    return [spec] if spec.drafting is None else [spec, spec.drafting]
