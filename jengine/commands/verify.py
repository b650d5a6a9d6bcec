"""`jengine verify`: how far a model's log probabilities and hidden states are from a reference's."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jengine import InvalidArgument
from jengine.commands.flags import add_engine, add_model, engine_fields
from jengine.commands.terminal import table, write, write_json

if TYPE_CHECKING:
    import numpy as np

    from jengine import Parity, ReferenceOutput
    from jengine.api.parity import Differences, Reference

TRANSFORMERS = "transformers"


def add_verify(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "verify",
        help="compare a model with transformers, or with your own code",
        description=(
            "Compare a model with a reference: log probabilities of prompts and of sampled tokens by"
            " position, the tokens that\nboth would choose, importance ratios, and hidden states by layer."
            " The exit code is 1 if rounding in the model's dtype\ndoes not explain the differences."
        ),
    )
    add_model(parser)
    parser.add_argument(
        "--against",
        metavar="REFERENCE",
        required=True,
        help=(
            "transformers (needs torch), or MODULE:FUNCTION: token ids int32[N] -> logits [N, vocab], or a"
            " jengine.ReferenceOutput"
        ),
    )
    parser.add_argument(
        "--rollout", type=int, default=32, help="tokens to sample after each prompt (default: 32)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    add_engine(parser)
    parser.set_defaults(run=_verify)


def _verify(options: argparse.Namespace) -> int:
    from jengine import LLM, verify

    with LLM(options.model, progress=not options.quiet, **engine_fields(options)) as llm:
        started = llm.started
        reference = _reference(options.against, started.folder, started.dtype)
        parity = verify(llm, reference, rollout=options.rollout)
    if options.json:
        write_json({"against": options.against, "dtype": started.dtype, **parity.plain()})
    else:
        verdict = "equal, but for rounding" if parity.equal else "different"
        write(f"{llm.model} in {started.dtype} against {options.against}: {verdict}\n{table(_rows(parity))}")
    return 0 if parity.equal else 1


def _reference(name: str, folder: Path, dtype: str) -> Reference:
    if name == TRANSFORMERS:
        return _of_transformers(folder, dtype)
    module, colon, function = name.partition(":")
    if not colon:
        raise InvalidArgument("against", name, "must be transformers, or MODULE:FUNCTION")
    sys.path.insert(0, os.getcwd())
    try:
        reference: Reference = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise InvalidArgument("against", name, f"cannot be imported: {error}") from None
    return reference


def _of_transformers(folder: Path, dtype: str) -> Reference:
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        raise InvalidArgument("against", TRANSFORMERS, "needs torch: pip install torch") from None
    from transformers import AutoModelForCausalLM

    from jengine import ReferenceOutput

    try:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    except (OSError, ValueError, KeyError) as error:  # no configuration, an unknown architecture
        raise InvalidArgument("against", TRANSFORMERS, f"it cannot load {folder}: {error}") from None

    def reference(tokens: np.ndarray) -> ReferenceOutput:
        with torch.no_grad():
            out = model(torch.tensor(tokens[None]).long(), output_hidden_states=True)
        hidden = [state[0].float().numpy() for state in out.hidden_states]
        return ReferenceOutput(out.logits[0].float().numpy(), hidden)

    return reference


def _rows(parity: Parity) -> list[list[str]]:
    rows = [["prompts", *_differences(parity.prompts)]]
    if parity.rollouts is not None and parity.ratio is not None:
        low, median, high = parity.ratio
        rows += [["rollouts", *_differences(parity.rollouts)]]
        rows += [["ratios", f"1 %: {low:.4g}", f"50 %: {median:.4g}", f"99 %: {high:.4g}", ""]]
    if parity.layers is None:
        return [*rows, ["layers", parity.why_no_layers, "", "", ""]]
    worst = f"largest {max(parity.layers):.1e}"
    if parity.layer is None:
        return [*rows, ["layers", f"all within {parity.limits.hidden:.0e}", worst, "", ""]]
    name = "embeddings" if parity.layer < 0 else f"layer {parity.layer}"
    error = f"{parity.layers[parity.layer + 1]:.1e}, more than {parity.limits.hidden:.0e}"
    return [*rows, ["layers", f"first that differs: {name}", error, worst, ""]]


def _differences(part: Differences) -> list[str]:
    largest = f"largest {part.largest:.1e} (text {part.text}, token {part.position})"
    if part.first is None:
        choices = "same choices"
    else:
        text, position, ours, theirs, margin = part.first
        choices = (
            f"{part.choices} other choices, the first in text {text} at {position}: {ours}, not {theirs},"
            f" which the reference prefers by {margin:.1e}"
        )
    return [f"{part.tokens} tokens", largest, f"mean {part.mean:.1e}", choices]
