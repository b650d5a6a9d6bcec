"""Speculative decoding: tokens a second with drafts over those without, and chosen against fixed numbers.

    python -m benchmarks.speculation [--model smollm2] [--streams 1 4 16 32] [--contexts 256 2048 8000]
        [--tasks edit extract quotes schema compact chat random] [--fixed 1 3 7 15] [--rounds 3] [--waves 1]
        [--name 2k] [--quick]

One engine serves all ways, which take turns. Each task's prompts hold a text of about `context` tokens, which
is in the prefix cache. Each stream and each round has a different text, so drafters find earlier outputs of
other texts alone. Tasks: `edit` returns a program with a change, `extract` copies sentences, `quotes`
summarizes with quotes, `schema` fills in a JSON schema, `compact` the same without whitespace, `chat` answers
a question, and `random` samples at temperature 1 after random words. A figure is the median over rounds of
the ratio of tokens a second.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT, made_model, save
from jengine import LLM, SamplingParams
from jengine.core.scheduling_options import SchedulingOptions
from jengine.core.speculation import MOST_DRAFTS
from jengine.core.structured_outputs import StructuredOutputs
from jengine.engine.loop.engine import Engine
from jengine.scheduling.costs.draft_costs import HowMany, all_of_them, most_a_second
from jengine.scheduling.drafters.choice import drafters_of
from jengine.scheduling.rules.speculation import Speculation as Rule

TASKS = ("edit", "extract", "quotes", "schema", "compact", "chat", "random")
NEW_TOKENS = 128
SCHEMA = {
    "type": "object",
    "properties": {
        "document_title": {"type": "string", "maxLength": 40},
        "number_of_authors": {"type": "integer", "minimum": 0, "maximum": 99},
        "is_about_computers": {"type": "boolean"},
        "suggested_category": {"enum": ["engineering", "literature", "history", "something else"]},
        "needs_another_review": {"type": "boolean"},
    },
    "required": [
        "document_title",
        "number_of_authors",
        "is_about_computers",
        "suggested_category",
        "needs_another_review",
    ],
    "additionalProperties": False,
}
QUESTIONS = (ROOT / "benchmarks" / "questions.txt").read_text().splitlines()


def pieces_of(kind: str) -> list[str]:
    """Pieces of which texts are made: functions of this project, or sentences about it."""
    if kind == "code":
        files = sorted((ROOT / "jengine" / "scheduling").rglob("*.py"))
        return [piece for file in files for piece in file.read_text().split("\n\n\n") if len(piece) > 200]
    prose = (ROOT / "benchmarks" / "english.txt").read_text() + (ROOT / "ARCHITECTURE.md").read_text()
    return [line.strip() + "." for line in prose.replace("\n", " ").split(". ") if 40 < len(line) < 300]


def _document(tokenizer: Any, kind: str, tokens: int, draw: random.Random) -> str:
    """About this many tokens of text."""
    pieces, separator = pieces_of(kind), "\n\n\n" if kind == "code" else " "
    draw.shuffle(pieces)
    text = ""
    for piece in pieces * 9:
        text += piece + separator
        if len(tokenizer.encode(text)) >= tokens:
            break
    return tokenizer.decode(tokenizer.encode(text)[:tokens])


def asked(tokenizer: Any, task: str, context: int, draw: random.Random) -> str:
    """The user's message."""
    if task == "edit":
        code = _document(tokenizer, "code", context, draw)
        return f"Return this program unchanged, but add a comment with the date above it.\n\n{code}"
    text = _document(tokenizer, "prose", context, draw)
    return {
        "extract": f"Copy the first five sentences of this text, word for word.\n\n{text}",
        "quotes": f"Summarize this text in three sentences, each with a quote from it.\n\n{text}",
        "schema": f"Describe this text as JSON.\n\n{text}",
        "compact": f"Describe this text as JSON.\n\n{text}",
        "chat": f"{text}\n\n{draw.choice(QUESTIONS)}",
        "random": " ".join(draw.sample(text.split(), min(len(text.split()), context // 2))),
    }[task]


def prompt(tokenizer: Any, task: str, context: int, draw: random.Random) -> Any:
    """The user's message, in the model's chat template if it has one."""
    message = asked(tokenizer, task, context, draw)
    if not tokenizer.chat_template:
        return message
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": message}], tokenize=False, add_generation_prompt=True
    )


def params_of(task: str, seed: int) -> SamplingParams:
    """Parameters as users would set them; of a fixed length where the answer's own end does not matter."""
    if task in ("schema", "compact"):
        structure = StructuredOutputs(json=SCHEMA, disable_any_whitespace=task == "compact")
        return SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, structured_outputs=structure)
    temperature = 1.0 if task == "random" else 0.0
    return SamplingParams(temperature=temperature, seed=seed, max_tokens=NEW_TOKENS, ignore_eos=True)


def ways(engine: Engine, fixed: Sequence[int]) -> dict[str, dict[str, Any]]:
    """By name, states of the engine's speculation: without drafts, as many as pay, and fixed numbers."""

    def state(how_many: HowMany, most: int) -> dict[str, Any]:
        scheduler = engine.scheduler
        drafters = drafters_of(SchedulingOptions(speculative_config="auto" if most else None))
        for drafter in drafters:
            drafter.most = most
        rule = Rule(
            scheduler.registry,
            scheduler.limits,
            scheduler.predictor,
            scheduler.timeline,
            drafters,
            how_many,
        )
        return vars(rule)

    named = {"none": state(most_a_second, 0), "auto": state(most_a_second, MOST_DRAFTS)}
    return {**named, **{f"fixed {most}": state(all_of_them, most) for most in fixed}}


def answer(llm: LLM, prompts: Sequence[Any], params: Sequence[SamplingParams]) -> tuple[float, list[Any]]:
    """Tokens a second, and the tokens."""
    begun = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begun
    tokens = [output.outputs[0].token_ids for output in outputs]
    return sum(map(len, tokens)) / seconds, tokens


def under_load(engine: Engine, first: int) -> float:
    """Tokens a second of the steps from number `first` on while requests wait."""
    steps = [step for step in engine.records.steps if step.number >= first and step.waiting]
    tokens = sum([step.rows - step.prompt_rows - step.drafts + step.accepted for step in steps[1:]])
    return tokens / (steps[-1].ended - steps[0].ended)


def cell(
    llm: LLM, task: str, streams: int, context: int, named: dict[str, Any], rounds: int, waves: int
) -> dict[str, Any]:
    """One task with this many streams: ratios over `none`, by way."""
    draw, engine = random.Random(f"{task} {context}"), llm._shared.engine
    count = streams * waves
    params = [params_of(task, seed) for seed in range(count)]
    registry = engine.scheduler.registry
    registry.max_num_seqs, registry.free_slots = streams, list(range(streams, 0, -1))  # none is in use
    rates: dict[str, list[float]] = {name: [] for name in named}
    outputs: dict[str, list[Any]] = {}
    counts: dict[str, tuple[int, int]] = {}
    speculation = engine.scheduler.speculation
    for number in range(rounds + 1):
        prompts = [prompt(llm.get_tokenizer(), task, context, draw) for _ in range(count)]
        answer(llm, prompts, [SamplingParams(max_tokens=1)] * count)  # prompts are in the prefix cache now
        for name in [*named] if number % 2 else reversed([*named]):
            vars(speculation).update(named[name])
            before, first = (speculation.tokens, speculation.right), engine.records.steps[-1].number + 1
            rate, tokens = answer(llm, prompts, params)
            rate = under_load(engine, first) if waves > 1 else rate
            named[name] = {**vars(speculation)}
            if number:  # drafters learn in the first round
                rates[name].append(rate)
                outputs[name] = tokens
                counts[name] = speculation.tokens - before[0], speculation.right - before[1]
    same = {
        name: sum(a == b for a, b in zip(found, outputs["none"], strict=True)) / count
        for name, found in outputs.items()
    }
    result: dict[str, Any] = {"task": task, "streams": streams, "context": context}
    for name, found in rates.items():
        ratios = [one / other for one, other in zip(found, rates["none"], strict=True)]
        result[name] = {
            "tokens_per_second": statistics.median(found),
            "ratio": statistics.median(ratios),
            "drafts": counts[name][0],
            "right": counts[name][1],
            "equal_outputs": same[name],
        }
    shown = ", ".join(f"{name} {result[name]['ratio']:.2f}" for name in named if name != "none")
    print(
        f"{task:8} {streams:2} streams, context {context}:"
        f" {result['none']['tokens_per_second']:.0f} tokens/s;"
        f" {shown}; right {counts['auto'][1]} of {counts['auto'][0]}; equal {same['auto']:.0%}",
        flush=True,
    )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="smollm2, 134m, demo, or a folder")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 4, 16, 32])
    parser.add_argument("--contexts", nargs="+", type=int, default=[256, 2048])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--fixed", nargs="*", type=int, default=[], help="fixed numbers of drafts to compare")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--waves", type=int, default=1, help="requests of each stream, one after another")
    parser.add_argument("--name", default="", help="end of the result file's name")
    parser.add_argument("--quick", action="store_true", help="the demo model, few cells; nothing is saved")
    options = parser.parse_args()
    if options.quick:
        options.model, options.streams, options.contexts, options.rounds = "demo", [1, 4], [256], 1
    model = _model(options.model)
    llm = LLM(
        str(model),
        dtype=options.dtype,
        max_num_seqs=max(64, *options.streams),
        max_model_len=max(options.contexts) + 2 * NEW_TOKENS + 128,
        warm_up="all",
        progress=True,
    )
    named = ways(llm._shared.engine, options.fixed)
    name = "_".join(["speculation", options.model, *filter(None, [options.name])])
    results = list[dict[str, Any]]()
    for context, task, streams in product(options.contexts, options.tasks, options.streams):
        results.append(cell(llm, task, streams, context, named, options.rounds, options.waves))
        if not options.quick:  # after each cell, since a grid takes long
            save(
                name,
                {"model": options.model, "dtype": options.dtype, "waves": options.waves, "cells": results},
            )
    llm.close()


def _model(name: str) -> Path | str:
    if name == "smollm2":
        from tools.smollm2 import smollm2

        return smollm2()
    return made_model(name) if name == "134m" else name


if __name__ == "__main__":
    main()
