"""Time to the first token of short turns in a chat: the rest of each prompt on rows, and in a tile.

    python -m benchmarks.short_turns [--model 134m] [--contexts 256 2048] [--questions 5 20] [--quick]

A conversation has ten turns. Each adds a question of a few tokens and gets an answer of four. All but these
tokens are in the prefix cache. Both ways use one engine and take turns, conversation by conversation; the
median over turns counts. Prompts are random; weights of the 134M shape are too.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np

from benchmarks.machine import made_model, save
from jengine.core.config import EngineConfig
from jengine.core.request import Request, SamplingParams
from jengine.core.updates import TokenUpdate
from jengine.engine.engine import Engine
from jengine.engine.start import start_engine

TURNS, ANSWER, ROUNDS = 10, 4, 6


def first_tokens(engine: Engine, context: int, question: int, name: str, seed: int) -> list[float]:
    """Seconds from arrival to first token of all turns but the first, which computes the context."""
    draw, vocab = np.random.default_rng(seed), engine.model.vocab_size
    tokens, seconds = draw.integers(0, vocab, context).tolist(), []
    for turn in range(TURNS + 1):
        params = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
        begun, first = time.perf_counter(), 0.0
        engine.add(Request(request_id=f"{name} {turn}", prompt_token_ids=tokens, params=params))
        answer = []
        while engine.has_work:
            for update in engine.step():
                assert isinstance(update, TokenUpdate)
                first = first or time.perf_counter() - begun
                answer.append(update.token)
        seconds.append(first)
        tokens = [*tokens, *answer, *draw.integers(0, vocab, question).tolist()]
    return seconds[1:]


def on_rows(engine: Engine) -> int:
    """Number of steps with a prompt on rows."""
    return sum(step.prompt_rows > 0 for step in engine.records.steps)


def measure(engine: Engine, context: int, question: int) -> dict[str, Any]:
    most, rows, tiles = engine.scheduler.table.tile_size - 1, list[float](), list[float]()
    before = on_rows(engine)
    for number in range(ROUNDS):
        ways = [(rows, most), (tiles, 0)]
        for found, limit in ways if number % 2 else reversed(ways):
            engine.scheduler.rows_or_tiles.most = limit
            engine.scheduler.blocks.reset()
            found += first_tokens(engine, context, question, f"{number} {limit}", number)
    turns = on_rows(engine) - before
    ms = {name: 1e3 * statistics.median(values) for name, values in (("rows", rows), ("tiles", tiles))}
    result = {"context": context, "question": question, **ms, "ratio": ms["tiles"] / ms["rows"]}
    result |= {"turns": len(rows), "turns_on_rows": turns}
    print(
        f"context {context}, {question} new tokens: first token after {ms['rows']:.1f} ms on rows,"
        f" {ms['tiles']:.1f} ms in a tile: {result['ratio']:.2f} times as fast; costs chose rows in"
        f" {turns} of {len(rows)} turns",
        flush=True,
    )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="134m", help="134m, demo, or a folder")
    parser.add_argument("--contexts", nargs="+", type=int, default=[256, 2048])
    parser.add_argument("--questions", nargs="+", type=int, default=[5, 20])
    parser.add_argument("--quick", action="store_true", help="the demo model, one context, nothing is saved")
    options = parser.parse_args()
    name = "demo" if options.quick else options.model
    contexts = [256] if options.quick else options.contexts
    model = str(made_model(name)) if name == "134m" else name
    limits = {"max_num_seqs": 32, "max_model_len": max(contexts) + 1024, "num_pages": 600}
    engine, _ = start_engine(EngineConfig.of(model, limits), progress=True)
    results = [measure(engine, context, question) for context in contexts for question in options.questions]
    engine.close()
    if not options.quick:
        save("short_turns", {"model": name, "results": results})


if __name__ == "__main__":
    main()
