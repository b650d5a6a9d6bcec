"""Random arrivals, aborts, priorities, stops and steps planned ahead, on pools small enough to run out."""

from __future__ import annotations

import contextlib
import random
from functools import partial
from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jengine.base.errors import InvalidArgument
from jengine.core.beam_params import BeamSearchParams
from jengine.scheduling.costs.draft_costs import all_of_them, most_a_second
from jengine.scheduling.costs.step_costs import StepCosts
from jengine.scheduling.requests.images import Images
from jengine.scheduling.step_plan import NO_WORK, Work
from jengine.table.program_table import ProgramTable, SamplerKey, TrunkKey, most_pages
from tests.scheduling.adversaries import knowing
from tests.scheduling.answers import VOCAB
from tests.scheduling.embedding_memory import FIRST, with_images
from tests.scheduling.strict_device import Loop

ROWS = 4  # of an image, at most
PICTURES = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3), st.integers(1, ROWS)), max_size=2)


def random_costs(seed: int) -> StepCosts:
    """Arbitrary costs: they may change durations, but never outputs."""

    class Drawn(StepCosts):
        def seconds(self, trunk: TrunkKey, sampler: SamplerKey | None = None, work: Work = NO_WORK) -> float:
            return random.Random(f"{seed} {trunk}").uniform(0.1, 10.0)

    return Drawn(ProgramTable((1,), (1,), (1,), 1))


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([1, 2, 3, 4, 8]),
        tile_size=st.sampled_from([1, 2, 4, 8]),
        max_num_seqs=st.integers(1, 20),
        more_tokens=st.integers(0, 16),
        max_model_len=st.integers(2, 40),
        more_pages=st.integers(0, 6) | st.integers(20, 40),
        bucketed=st.booleans(),
        of_gpu=st.booleans(),
        by_row=st.booleans(),
        policy=st.sampled_from(["fcfs", "priority", "fair"]),
        priority_ageing=st.sampled_from([0.0, 1e-3, 60.0]),
        strategy=st.sampled_from(["throughput", "latency", "memory"]),
        on_late=st.sampled_from(["serve", "reject"]),
        batching=st.sampled_from(["continuous", "continuous", "dynamic", "static"]),
        costs=st.none() | st.integers(0, 9),
        windows=st.sampled_from([(None,), (None,), (5,), (None, 3), (None, 6, 6), (1, 9)]),
        prefix_caching=st.booleans(),
        few=st.booleans(),
        invariant_tiles=st.sampled_from([0, 0, 1, 2]),
        steps=st.sampled_from([1, 8, "auto"]),
        host_pages=st.sampled_from([0, 0, 1, 4, 30]),
        staged=st.integers(1, 5),
        more_states=st.sampled_from([None, None, 0, 2, 20]),
        draft_states=st.sampled_from([0, 1, 3, 16]),
        prompt_rows=st.booleans(),
        right=st.sampled_from([None, None, 0.0, 0.6, 1.0]),
        how_many_drafts=st.sampled_from([all_of_them, most_a_second]),
        stages=st.sampled_from([1, 1, 2, 3]),
        places=st.sampled_from([0, 0, 1, 2]),
        rows=st.sampled_from([0, 2 * ROWS, 5 * ROWS]),
        turns=st.booleans(),
        looks_ahead=st.booleans(),
    )
    def start(
        self,
        page_size,
        tile_size,
        max_num_seqs,
        more_tokens,
        max_model_len,
        more_pages,
        bucketed,
        of_gpu,
        by_row,
        policy,
        priority_ageing,
        strategy,
        on_late,
        batching,
        costs,
        windows,
        prefix_caching,
        few,
        invariant_tiles,
        steps,
        host_pages,
        staged,
        more_states,
        draft_states,
        prompt_rows,
        right,
        how_many_drafts,
        stages,
        places,
        rows,
        turns,
        looks_ahead,
    ):
        if more_states is not None:
            host_pages = 0  # refused with recurrent states
        else:
            draft_states = 0
        looks_ahead = looks_ahead and rows > 0 and more_states is None and not invariant_tiles
        whole_tiles = -(-ROWS // tile_size) if looks_ahead else 1
        at_once = whole_tiles * tile_size
        pages = -(-max_model_len // page_size)  # of the longest sequence
        most = sum(most_pages(max_model_len - 1, window, page_size, at_once) for window in windows)
        self.loop = Loop(
            max_model_len=max_model_len,
            tile_size=tile_size,
            page_size=page_size,
            num_pages=1 + most + more_pages * len(windows),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + at_once + more_tokens,
            page_buckets=tuple(sorted({1, (pages + 1) // 2, pages})) if bucketed else (0,),
            of_gpu=of_gpu,
            by_row=by_row,
            policy=policy,
            priority_ageing=priority_ageing,
            strategy="memory" if strategy == "latency" and batching != "continuous" else strategy,
            on_late=on_late,
            batching=batching,
            batch_wait_ms=0.0,
            windows=windows,
            prefix_caching=prefix_caching,
            costs=None if costs is None else random_costs(costs),
            invariant_tiles=invariant_tiles,
            num_scheduler_steps=steps if tile_size == 8 and not invariant_tiles and stages == 1 else 1,
            host_pages=host_pages if prefix_caching else 0,
            staged=staged,
            num_states=0 if more_states is None else max(1 + max_num_seqs + more_states, 3) + draft_states,
            draft_states=draft_states,
            prompt_rows=prompt_rows and more_states is None and not invariant_tiles,
            drafters=() if right is None else [knowing(right, max_model_len)],
            how_many_drafts=how_many_drafts,
            stages=stages,
            images=Images(rows, FIRST, turns=turns, ahead=looks_ahead) if rows else None,
            whole_tiles=whole_tiles,
            max_loras=places,
            clock=partial(next, count(0.0, 1e-3)),  # the true one would not repeat itself
        )
        if places:
            for name in "abc":
                self.load_adapter(name)
        if few:
            self.loop.begin_with_few()

    @precondition(lambda self: self.loop.scheduler.registry.loras.places)
    @rule(name=st.sampled_from("abc"))
    def load_adapter(self, name):
        loras = self.loop.scheduler.registry.loras
        loras.load(name, loras.next_number())

    def prompt(self, data):
        """Its tokens, and other fields of its request."""
        longest = self.loop.max_model_len - 1
        prompt = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=longest))
        # begins as another does, with a part of its output or without
        if self.loop.sequences and data.draw(st.booleans()):
            known = data.draw(st.sampled_from(self.loop.sequences)).tokens
            prompt = [*known[: data.draw(st.integers(0, len(known)))], *prompt][:longest]
        registry, fields = self.loop.scheduler.registry, {}
        if registry.loras.places:
            fields["lora_name"] = data.draw(st.sampled_from([None, "a", "b", "c"]))
        if registry.images.rows and (drawn := data.draw(PICTURES)):
            ids, images = with_images(prompt[: max(longest - sum(rows for *_, rows in drawn), 1)], drawn)
            if len(ids) <= longest:
                return ids, {**fields, "images": images}
        return prompt, fields

    @rule(
        data=st.data(),
        priority=st.integers(-1, 1),
        ignore_eos=st.booleans(),
        stops=st.lists(st.integers(0, VOCAB - 1), max_size=3),
        n=st.sampled_from([1, 1, 1, 2, 3, 5]),
        salt=st.sampled_from([None, None, "a", "b"]),
        scored=st.sampled_from([None, None, None, 1]),
        due=st.sampled_from(
            [{}, {}, {"ttft_ms": 1e6, "tpot_ms": 1e6}, {"ttft_ms": 1e4}, {"ttft_ms": 1e-3}, {"tpot_ms": 1e-3}]
        ),
        client=st.sampled_from(["a", "b", ""]),
    )
    def add(self, data, priority, ignore_eos, stops, n, salt, scored, due, client):
        prompt, fields = self.prompt(data)
        max_tokens = data.draw(st.none() | st.integers(1, 30))
        min_tokens = data.draw(st.integers(0, min(3, max_tokens or 3)))
        params = {
            "max_tokens": max_tokens,
            "min_tokens": min_tokens,
            "ignore_eos": ignore_eos,
            "stop_token_ids": stops,
        }
        self.loop.add(
            prompt,
            priority,
            n=n,
            salt=salt,
            targets={**due, "client": client, **fields},
            prompt_logprobs=scored,
            **params,
        )

    @precondition(lambda self: not self.loop.device.states.pages)
    @rule(
        data=st.data(),
        width=st.integers(1, 4),
        max_tokens=st.integers(1, 30),
        ignore_eos=st.booleans(),
        temperature=st.sampled_from([0.0, 0.0, 1.0]),
        length_penalty=st.sampled_from([1.0, 0.0, -2.0, 2.0]),
        salt=st.sampled_from([None, "a"]),
        priority=st.integers(-1, 1),
    )
    def add_beams(self, data, width, max_tokens, ignore_eos, temperature, length_penalty, salt, priority):
        prompt, fields = self.prompt(data)
        params = BeamSearchParams(
            beam_width=min(width, self.loop.scheduler.registry.max_num_seqs),
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            temperature=temperature,
            length_penalty=length_penalty,
        )
        with contextlib.suppress(InvalidArgument):  # more pages than there are
            self.loop.add_beams(prompt, params, priority, cache_salt=salt, **fields)

    @rule(programs=st.integers(1, 12))
    def programs_become_ready(self, programs):
        self.loop.get_more(programs)

    @rule(ahead=st.integers(0, 3), steps=st.integers(1, 8))
    def step(self, ahead, steps):
        for _ in range(steps):
            self.loop.step(ahead)

    @precondition(lambda self: self.loop.sequences)
    @rule(data=st.data())
    def abort(self, data):
        self.loop.abort(data.draw(st.sampled_from(self.loop.sequences)))

    @precondition(
        lambda self: any(
            s.output_token_ids for s in self.loop.sequences if s.finish_reason is None and not s.searches
        )
    )
    @rule(data=st.data())
    def stop_at_string(self, data):
        running = [
            s
            for s in self.loop.sequences
            if s.output_token_ids and s.finish_reason is None and not s.searches
        ]
        self.loop.stop_at_string(data.draw(st.sampled_from(running)))

    @precondition(lambda self: self.loop.sequences)
    @rule(ahead=st.integers(0, 2))
    def drain(self, ahead):
        self.loop.drain(ahead)

    @rule(strategy=st.sampled_from(["throughput", "latency", "memory", "auto"]))
    def set_strategy(self, strategy):
        if self.loop.scheduler.options.batching == "continuous" or strategy in ("throughput", "memory"):
            self.loop.scheduler.admission.set_strategy(strategy)

    @rule()
    def reset_prefix_cache(self):
        self.loop.scheduler.blocks.reset()
        assert self.loop.scheduler.blocks.cached == 0

    @invariant()
    def integrity(self):
        if hasattr(self, "loop"):
            self.loop.check()

    def teardown(self):
        if hasattr(self, "loop"):
            self.loop.drain(ahead=1)


SchedulerMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
TestScheduler = SchedulerMachine.TestCase


@pytest.mark.full
class TestMoreScheduler(SchedulerMachine.TestCase):
    settings = settings(max_examples=500, stateful_step_count=30)


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("seed", range(4))
def test_a_pool_that_runs_out_changes_no_output(policy, ahead, seed):
    """Two sequences of full length fill the pool; six want to run."""
    draw = random.Random(seed)
    loop = Loop(
        max_model_len=48,
        tile_size=8,
        page_size=4,
        num_pages=1 + 24,
        max_num_seqs=6,
        max_num_batched_tokens=22,
        policy=policy,
    )
    for _ in range(40):
        prompt = [draw.randrange(VOCAB) for _ in range(draw.randint(1, 24))]
        loop.add(prompt, draw.randint(0, 2), max_tokens=draw.randint(1, 40), ignore_eos=draw.random() < 0.7)
        for _ in range(draw.randint(0, 3)):
            loop.step(ahead)
    loop.drain(ahead)
    assert loop.exhausted
    assert loop.scheduler.registry.num_preemptions == sum(s.num_preemptions for s in loop.sequences) > 3
