"""Benefits of host memory: a chat with more conversations than the device's cache holds, with and without the
host tier.

    python -m benchmarks.host_tier [--rounds 2] [--dtype float32] [--quick]

50 conversations take turns, always in the same order, four at once. So each has been evicted when its next
turn begins. Every turn sends the whole conversation so far and a new question. One engine and one set of
programs, with the tier on and off in turn, and both caches empty at the start of each. The 134M shape, random
weights, answers of a fixed length; --quick uses the demo model and saves nothing.

"Computed again" counts tokens of a conversation that an earlier turn had computed. Times are from a turn's
arrival to its first token.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.machine import made_model, save
from benchmarks.restart import restart_scheduler
from benchmarks.sharing import CountingRunner, in_turn
from jengine.core.config import EngineConfig
from jengine.core.request import Request, SamplingParams
from jengine.core.updates import TokenUpdate
from jengine.engine.start import start_engine
from jengine.execution.runner import Runner

CONVERSATIONS, AT_ONCE, TURNS = 50, 4, 4
OPENING, QUESTION, ANSWER = 192, 32, 32  # tokens
PAGE_SIZE = 16


@dataclass(slots=True)
class Chat:
    """One run, by turn."""

    first: list[list[float]] = field(default_factory=list)  # seconds to first tokens
    again: list[int] = field(default_factory=list)  # tokens computed again
    seconds: list[float] = field(default_factory=list)


class Bench:
    def __init__(self, model: str, turns: int, dtype: str = "auto") -> None:
        self.turns = turns
        longest = OPENING + turns * (QUESTION + ANSWER)
        held = CONVERSATIONS // 6  # conversations that the device holds
        options = {
            "max_num_seqs": 8,
            "max_model_len": longest,
            "num_pages": 1 + held * -(-longest // PAGE_SIZE),
            "page_size": PAGE_SIZE,
        }
        self.engine, started = start_engine(
            EngineConfig.of(
                model, {**options, "swap_space": 4.0, "max_num_batched_tokens": 264, "dtype": dtype}
            )
        )
        self.engine.wait_until_compiled()
        self.dtype, self.held = started.dtype, held
        runner = self.engine.runner
        assert isinstance(runner, Runner)
        self.runner = self.engine.runner = CountingRunner(runner.worker)
        self.vocab = self.engine.model.vocab_size

    def use(self, on: bool) -> None:
        """Switches the tier on or off, and empties both caches."""
        spec = self.runner.spec
        while self.runner._spilling:
            self.runner.swapped()
        restart_scheduler(self.engine, host_pages=spec.host_pages if on else 0, staged=spec.staged)

    def chat(self, on: bool) -> tuple[Chat, list[list[int]]]:
        """Runs the chat. Returns times, and all conversations."""
        self.use(on)
        rng = np.random.default_rng(0)
        talks = [rng.integers(2, self.vocab, OPENING).tolist() for _ in range(CONVERSATIONS)]
        found = Chat()
        for _ in range(self.turns):
            known = sum(max(len(talk) - 1, 0) for talk in talks) if found.again else 0
            new = sum(map(len, talks)) - known + CONVERSATIONS * QUESTION
            for talk in talks:
                talk += rng.integers(2, self.vocab, QUESTION).tolist()
            before, start = self.runner.prompt_tokens, time.perf_counter()
            found.first.append(self._turn(talks))
            found.seconds.append(time.perf_counter() - start)
            found.again.append(self.runner.prompt_tokens - before - new)
        return found, talks

    def _turn(self, talks: list[list[int]]) -> list[float]:
        """Runs a turn of every conversation, AT_ONCE at a time. Appends the answers, and returns seconds to
        first tokens."""
        engine, waiting, arrivals, first = (
            self.engine,
            iter(range(len(talks))),
            dict[str, float](),
            dict[str, float](),
        )
        params = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)

        def come() -> None:
            if (number := next(waiting, None)) is not None:
                arrivals[str(number)] = time.perf_counter()
                engine.add(Request(request_id=str(number), prompt_token_ids=[*talks[number]], params=params))

        for _ in range(AT_ONCE):
            come()
        while engine.has_work:
            for update in engine.step():
                assert isinstance(update, TokenUpdate)
                first.setdefault(update.request_id, time.perf_counter() - arrivals[update.request_id])
                talks[int(update.request_id)].append(update.token)
                if update.finish_reason is not None:
                    come()
        return [*first.values()]


def summary(found: Chat, tier: Any) -> dict[str, Any]:
    later = [seconds for turn in found.first[1:] for seconds in turn]  # in the first turn there are no hits
    median, p90 = np.percentile(later, [50, 90]).tolist()
    return {
        "tokens_computed_again": sum(found.again[1:]),
        "first_token_median_ms": round(1e3 * median, 1),
        "first_token_p90_ms": round(1e3 * p90, 1),
        "first_turn_s": round(found.seconds[0], 2),
        "later_turns_s": round(sum(found.seconds[1:]), 2),
        **({} if tier is None else {"pages_spilled": tier.spilled, "pages_fetched": tier.fetched}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--dtype",
        default="auto",
        help="in float32, talks with and without the tier are equal; in bfloat16 near-ties may turn",
    )
    parser.add_argument(
        "--quick", action="store_true", help="the demo model, one round, fewer turns, nothing saved"
    )
    options = parser.parse_args()
    bench = Bench(
        "demo" if options.quick else str(made_model("134m")), 3 if options.quick else TURNS, options.dtype
    )
    talks: dict[bool, list[list[int]]] = {}

    def run(on: bool) -> dict[str, Any]:
        found, talks[on] = bench.chat(on)
        return summary(found, bench.engine.scheduler.blocks.tier)

    found = in_turn(1 if options.quick else options.rounds, run)
    equal = sum(one == other for one, other in zip(talks[False], talks[True], strict=True))
    costs = bench.engine.scheduler.predictor.costs
    print(
        f"\n{CONVERSATIONS} conversations, {AT_ONCE} at once, {bench.turns} turns of {QUESTION} + {ANSWER}"
        f" tokens after {OPENING};"
    )
    print(f"the device holds {bench.held} of them. Later turns:")
    for on, runs in found.items():
        for one in runs:
            print(
                f"    tier {'on' if on else 'off':4}"
                + "  ".join(f"{name} {value}" for name, value in one.items())
            )
    ratio = statistics.median(
        off["first_token_median_ms"] / on["first_token_median_ms"]
        for off, on in zip(found[False], found[True], strict=True)
    )
    print(
        f"    first token, off / on: {ratio:.2f}; talks that are equal: {equal} of {CONVERSATIONS}; measured"
        f" {costs.swaps}"
    )
    if not options.quick:
        save(
            "host_tier",
            {
                "model": "134m",
                "dtype": bench.dtype,
                "ratio_first_token": round(ratio, 2),
                "equal": equal,
                "off": found[False],
                "on": found[True],
            },
        )


if __name__ == "__main__":
    main()
