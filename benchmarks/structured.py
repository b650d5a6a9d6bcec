"""The cost of structured output: the same engine and token counts, with and without a JSON schema,
interleaved.

    python -m benchmarks.structured [--repeat 15] [--quick]

The demo model, 32 requests at once with the same number of tokens: the schema is a list too long to end
before that. Arms:

greedy    the cheapest sampler
sample    temperature 1
full      the sampler that masks need, without a mask
allowed   a mask without cost that allows everything: the cost of waiting for the previous tokens
json      the schema's mask
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks.machine import save
from jengine.checkpoints import resolve
from jengine.core.config import EngineConfig
from jengine.core.request import Request, SamplingParams
from jengine.engine.loop.engine import Engine
from jengine.engine.start import start_engine
from jengine.text.masks import Grammar, make_mask
from jengine.text.tokenizer import Tokenizer

ROWS, TOKENS = 32, 128
PROMPT = 'people = [\n    {"name": "Ada", "age": 36, "tags": ["a", "b"], "active": true},\n'
SCHEMA = {
    "type": "array",
    "minItems": 100,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
            "active": {"type": "boolean"},
        },
        "required": ["name", "age", "tags", "active"],
        "additionalProperties": False,
    },
}


def arms(vocab: int) -> dict[str, Callable[..., SamplingParams]]:
    """Sampling parameters, except the seed."""
    base = partial(SamplingParams, temperature=1.0, max_tokens=TOKENS, ignore_eos=True)
    return {
        "greedy": partial(base, temperature=0.0),
        "sample": base,
        "full": partial(base, logprobs=0),
        "allowed": partial(base, allowed_token_ids=list(range(vocab))),
        "json": partial(base, structured_outputs={"json": SCHEMA}),
    }


class Clock:
    """Seconds in each wrapped method, and number of calls."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)

    def wrap(self, owner: type, method: str, name: str) -> None:
        inner = getattr(owner, method)

        def timed(*args: Any) -> Any:
            begin = time.perf_counter()
            try:
                return inner(*args)
            finally:
                self.seconds[name] += time.perf_counter() - begin
                self.calls[name] += 1

        setattr(owner, method, timed)

    def microseconds(self) -> dict[str, float]:
        """Microseconds per call of each method."""
        return {name: round(1e6 * self.seconds[name] / self.calls[name], 1) for name in self.seconds}


def measure(
    engine: Engine, tokenizer: Tokenizer, params: Callable[..., SamplingParams]
) -> tuple[list[float], float]:
    """Seconds of each step while all requests are running, and of creating a request's mask."""
    each = [params(seed=i) for i in range(ROWS)]
    begin = time.perf_counter()
    masks = [make_mask(one, tokenizer) for one in each]
    made = (time.perf_counter() - begin) / ROWS
    prompt = tokenizer.encode(PROMPT)
    for i, one in enumerate(each):
        engine.add(Request(request_id=str(i), prompt_token_ids=prompt, params=one, mask=masks[i]))
    while engine.scheduler.registry.num_waiting:
        engine.step()
    steps = []
    while engine.scheduler.registry.num_running == ROWS:
        begin = time.perf_counter()
        engine.step()
        steps.append(time.perf_counter() - begin)
    while engine.has_work:
        engine.step()
    return steps, made


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="one run of each, nothing saved")
    options = parser.parse_args()
    engine, _ = start_engine(EngineConfig.of("demo", {"max_num_seqs": ROWS}))
    tokenizer = Tokenizer.load(resolve("demo"))
    clock = Clock()
    clock.wrap(Grammar, "fill", "fill")
    clock.wrap(Grammar, "accept", "accept")
    wanted = arms(engine.model.vocab_size)
    for params in wanted.values():
        measure(engine, tokenizer, params)  # the first steps of a process are slower
    steps: dict[str, list[float]] = defaultdict(list)
    made: list[float] = []
    for _ in range(1 if options.quick else options.repeat):
        for arm, params in wanted.items():
            took, mask = measure(engine, tokenizer, params)
            steps[arm] += took
            if arm == "json":
                made.append(mask)

    # Other load only makes steps longer: the lowest tenth is affected least.
    ms = {arm: 1e3 * np.percentile(each, [10, 50]) for arm, each in steps.items()}
    rate = {arm: 1e3 * ROWS / each for arm, each in ms.items()}
    share = {arm: each / rate["sample"] for arm, each in rate.items()}
    print(f"\n{ROWS} requests decoding, {len(made)} runs of {TOKENS} tokens each: p10 of steps, median\n")
    print(f"{'arm':10}{'ms a step':>18}{'tokens/s':>16}{'of sample':>16}")
    for arm in wanted:
        print(
            f"{arm:10}{ms[arm][0]:10.2f}{ms[arm][1]:8.2f}{rate[arm][0]:9.0f}{rate[arm][1]:7.0f}{share[arm][0]:9.2f}{share[arm][1]:7.2f}"
        )
    calls, mask_ms = clock.microseconds(), 1e3 * statistics.median(made)
    print(
        f"the schema's mask: {calls['fill']:.0f} us a token to fill, {calls['accept']:.0f} us to accept it;"
        f" {mask_ms:.1f} ms to make"
    )
    if not options.quick:
        columns = {"ms_per_step": ms, "tokens_per_second": rate, "of_sample": share}
        result = {
            arm: {name: column[arm].round(3).tolist() for name, column in columns.items()} for arm in wanted
        }
        mask = {"microseconds_a_token": calls, "ms_to_make": round(mask_ms, 2)}
        save("structured", {"rows": ROWS, "tokens": TOKENS, "p10_and_median_of_steps": result, "mask": mask})


if __name__ == "__main__":
    main()
