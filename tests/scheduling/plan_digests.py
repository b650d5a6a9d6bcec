"""Digests of the plans of 5,000 random requests: a change of the scheduler's structure must not change a
single plan.

If a change of behaviour is intended, record them again: `python -m tests.scheduling.plan_digests`.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from jengine.base.errors import InvalidArgument
from jengine.core.beam_params import BeamSearchParams
from jengine.scheduling.costs.step_costs import StepCosts
from jengine.scheduling.step_plan import NO_WORK, Work
from jengine.table.program_table import ProgramTable, SamplerKey, TrunkKey, most_pages
from tests.scheduling.answers import VOCAB
from tests.scheduling.strict_device import Loop

RUNS, REQUESTS = 100, 50
# fields that are newer than the digests, where they ask for nothing, and a plan's rows, which its spans tell
UNUSED = re.compile(
    r", (adapted=0|lora=0|loras=\[\]|turns=None|after=0|ahead=None|overtakes=0|thinking_token_budget=None"
    r"|rows=\d+(?=, guesses=))(?=[,)])"
)
RECORDED = Path(__file__).with_name("plan_digests.json")
WINDOWS = [(None,), (None,), (5,), (None, 3), (None, 6, 6), (1, 9)]
TARGETS: list[dict[str, float]] = [
    {},
    {},
    {"ttft_ms": 400.0, "tpot_ms": 90.0},
    {"ttft_ms": 150.0},
    {"tpot_ms": 30.0},
    {"ttft_ms": 1e-3},
]


class Costs(StepCosts):
    """Costs that grow with a step's size. They are exact in binary, so sums do not depend on the machine."""

    def seconds(self, trunk: TrunkKey, sampler: SamplerKey | None = None, work: Work = NO_WORK) -> float:
        return (
            (64 + 2 * trunk.rows + 8 * trunk.tiles + trunk.pages) / 4096
            + work.context / 2**18
            + work.attended / 2**19
        )


class Run:
    """One scheduler with options drawn at random, and the digest of all that it plans."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        self.now, self.digest = 0.0, hashlib.blake2b(digest_size=8)
        page_size, tile_size = draw.choice([1, 2, 4, 8]), draw.choice([1, 2, 4, 8, 8])
        max_model_len, windows = draw.randint(8, 48), draw.choice(WINDOWS)
        invariant, states = draw.choice([0, 0, 0, 1, 2]), draw.choice([None, None, None, 0, 4, 20])
        if states is not None:
            invariant = 0
        most = sum(most_pages(max_model_len - 1, window, page_size, tile_size) for window in windows)
        max_num_seqs, batching = (
            draw.randint(2, 16),
            draw.choice(["continuous", "continuous", "continuous", "dynamic", "static"]),
        )
        strategy = draw.choice(["throughput", "latency", "memory"])
        self.strategies = (
            ["throughput", "memory"]
            if batching != "continuous" or invariant
            else ["throughput", "latency", "memory", "auto"]
        )
        options: dict[str, Any] = {
            "policy": draw.choice(["fcfs", "priority", "fair"]),
            "priority_ageing": draw.choice([0.0, 0.25, 64.0]),
            "strategy": strategy if strategy in self.strategies else "memory",
            "on_late": draw.choice(["serve", "reject"]),
            "batching": batching,
            "batch_wait_ms": 62.5,
            "num_scheduler_steps": draw.choice([1, 8, "auto"]) if tile_size == 8 and not invariant else 1,
            "prefix_caching": draw.random() < 0.8,
            "staged": draw.randint(1, 5),
        }
        options["host_pages"] = draw.choice([0, 4, 30]) if options["prefix_caching"] and states is None else 0
        pages = -(-max_model_len // page_size)
        self.states, self.max_model_len = states is not None, max_model_len
        self.loop = Loop(
            max_model_len=max_model_len,
            tile_size=tile_size,
            page_size=page_size,
            num_pages=1 + most + draw.choice([0, 2, 6, 30]) * len(windows),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + tile_size * draw.randint(1, 4),
            page_buckets=tuple(sorted({1, (pages + 1) // 2, pages})) if draw.random() < 0.5 else (0,),
            windows=windows,
            costs=Costs(ProgramTable((1,), (1,), (1,), 1)),
            invariant_tiles=invariant,
            prompt_rows=seed % 2 == 1 and states is None and not invariant,
            num_states=0 if states is None else max(1 + max_num_seqs + states, 3),
            clock=lambda: self.now,
            **options,
        )
        if draw.random() < 0.3:
            self.loop.begin_with_few()
        self._record(self.loop)

    def _record(self, loop: Loop) -> None:
        """Adds everything that passes from the scheduler to execution to the digest. Time passes with each
        step.
        """
        scheduler = loop.scheduler
        schedule, take_swaps = scheduler.schedule, scheduler.take_swaps

        def scheduled() -> Any:
            plan = schedule()
            self._add(UNUSED.sub("", repr(plan)))
            self.now += plan.seconds if plan is not None else 1 / 64
            return plan

        def swaps() -> Any:
            swaps = take_swaps()
            self._add(repr(swaps))
            return swaps

        scheduler.schedule, scheduler.take_swaps = scheduled, swaps  # type: ignore[method-assign]

    def _add(self, text: str) -> None:
        self.digest.update(text.encode())

    def go(self) -> str:
        """Runs all requests to their ends. Returns the digest."""
        draw, loop = self.draw, self.loop
        actions: list[Callable[[], object]] = [
            self._abort,
            self._stop,
            self._change,
            loop.scheduler.blocks.reset,
        ]
        actions.append(lambda: loop.get_more(draw.randint(1, 6)))
        ahead = draw.randint(0, 2)
        while len(loop.sequences) < REQUESTS:
            for _ in range(draw.choice([0, 1, 1, 2, 5])):
                self._arrive()
            if draw.random() < 0.1:
                draw.choice(actions)()
            for _ in range(draw.choice([1, 1, 2, 8])):
                loop.step(ahead)
        loop.drain(ahead)
        scheduler = loop.scheduler
        for s in loop.sequences:
            self._add(
                f"{s.request_id} {s.output_token_ids} {s.found} {s.finish_reason} {s.stop_reason} "
                f"{s.num_preemptions} {s.num_cached} {s.arrival} {s.scheduled} {s.first_token} {s.due} "
                f"{s.late}"
            )
        prefixes, goodput = scheduler.prefixes, scheduler.acceptance.goodput
        counts = f"{prefixes.queries} {prefixes.hits} {prefixes.host_queries} {prefixes.host_hits}"
        self._add(
            f"{scheduler.registry.num_preemptions} {counts} {prefixes.host_declined} {prefixes.resumptions} "
            f"{sorted(scheduler.admission.decisions.items())} "
            f"{goodput.met} {goodput.missed} {goodput.rejected}"
        )
        return self.digest.hexdigest()

    def _arrive(self) -> None:
        draw, loop, longest = self.draw, self.loop, self.max_model_len - 1
        prompt = [draw.randrange(VOCAB) for _ in range(draw.randint(1, longest))]
        if loop.sequences and draw.random() < 0.5:  # begins as another does
            known = draw.choice(loop.sequences).tokens
            prompt = [*known[: draw.randint(0, len(known))], *prompt][:longest]
        priority, salt, client = (
            draw.randint(-1, 1),
            draw.choice([None, None, "a", "b"]),
            draw.choice(["a", "b", ""]),
        )
        if not self.states and draw.random() < 0.15:
            width = min(draw.randint(1, 4), loop.scheduler.registry.max_num_seqs)
            params = BeamSearchParams(
                beam_width=width, max_tokens=draw.randint(1, 20), temperature=draw.choice([0.0, 0.0, 1.0])
            )
            with suppress(InvalidArgument):  # more pages than there are
                loop.add_beams(prompt, params, priority, cache_salt=salt)
            return
        max_tokens = draw.randint(1, 30)
        loop.add(prompt, priority, n=draw.choice([1, 1, 1, 2, 3, 5]), salt=salt,
            targets={**draw.choice(TARGETS), "client": client},
                 prompt_logprobs=draw.choice([None, None, None, 1]), max_tokens=max_tokens,
                 min_tokens=draw.randint(0, min(3, max_tokens)),
                 ignore_eos=draw.random() < 0.5,
                 stop_token_ids=[draw.randrange(VOCAB) for _ in range(draw.randint(0, 2))],
                 presence_penalty=draw.choice([0.0, 0.0, 0.5]), top_k=draw.choice([0, 0, 5]))  # fmt: skip

    def _abort(self) -> None:
        if self.loop.sequences:
            self.loop.abort(self.draw.choice(self.loop.sequences))

    def _stop(self) -> None:
        running = [
            s
            for s in self.loop.sequences
            if s.output_token_ids and s.finish_reason is None and not s.searches
        ]
        if running:
            self.loop.stop_at_string(self.draw.choice(running))

    def _change(self) -> None:
        self.loop.scheduler.admission.set_strategy(self.draw.choice(self.strategies))  # type: ignore[arg-type]


if __name__ == "__main__":
    RECORDED.write_text(json.dumps([Run(seed).go() for seed in range(RUNS)], indent=0) + "\n")
