"""Adapters with any numbers change their own requests alone.

Requests of the model and of healthy adapters run beside requests of hostile ones, and beside requests of
harmless ones under the same names. So both runs have the same steps, and must have the same bits. Each run
answers all requests twice, the second time from cached pages, and pages of hostile requests are used again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from benchmarks.restart import restart_scheduler
from jengine import ModelError
from jengine.core.request import SamplingParams
from jengine.engine.loop.engine import Engine
from jengine.engine.operations import UnloadLora
from tests.engine.invariance import OPTIONS
from tests.engine.loras import GREEDY, TARGETS, load, prompts, run_adapted
from tests.engine.running import Answer, Estimates
from tests.golden.loras import Lora, lora

LARGEST = [float(ml_dtypes.finfo(dtype).max) for dtype in (np.float32, ml_dtypes.bfloat16, np.float16)]
PAGES = 64
AT_ONCE = 6  # hostile adapters; two more than fit beside the healthy ones
DRAWN = SamplingParams(
    temperature=0.8, top_k=20, top_p=0.9, seed=3, max_tokens=8, ignore_eos=True, logprobs=3
)
PENALIZED = SamplingParams(
    temperature=0.7, seed=4, frequency_penalty=0.5, max_tokens=8, ignore_eos=True, logprobs=3
)
SCORED = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=3, prompt_logprobs=2)
PARAMS = [GREEDY, DRAWN, PENALIZED, SCORED]


def hostile(variant: str, number: int) -> Lora:
    """A random adapter, of one kind after the other."""
    rng = np.random.default_rng(number)
    config, tensors = lora(variant, ("plain", "rs")[number % 2], str(number))
    config, names = {**config}, [*tensors]

    def some() -> str:
        return names[rng.integers(len(names))]

    def side(letter: str) -> list[str]:
        return [name for name in names if name.partition(".lora_")[2].removeprefix("embedding_")[0] == letter]

    def signs(name: str) -> np.ndarray:
        return np.where(rng.random(tensors[name].shape) < 0.5, 1, -1)

    def filled(which: Sequence[str], value: float) -> None:
        for name in which:
            tensors[name] = (value * signs(name)).astype(np.float32)

    def element(value: float) -> None:
        name = some()
        tensors[name] = tensors[name].copy()
        tensors[name].reshape(-1)[rng.integers(tensors[name].size)] = value

    def multiplied(factor: float) -> None:
        with np.errstate(over="ignore"):
            tensors.update({name: (array * factor).astype(np.float32) for name, array in tensors.items()})

    def without_ranks() -> None:
        for name, array in tensors.items():
            tensors[name] = array[:0] if name in side("A") else array[:, :0]

    largest = LARGEST[rng.integers(3)]
    kinds: list[Callable[[], object]] = [
        *(lambda value=value: filled(side("A"), value) for value in LARGEST),  # type: ignore[misc]
        lambda: filled(side("B"), largest / 4),
        lambda: filled(names, largest / 4),
        lambda: filled([some()], LARGEST[2]),
        lambda: element(largest),
        lambda: element(np.nan),
        lambda: element(np.inf),
        lambda: config.update(lora_alpha=float("nan")),
        lambda: config.update(lora_alpha=float("-inf")),
        lambda: config.update(lora_alpha=float(10 ** rng.uniform(0, 60))),
        lambda: config.update(alpha_pattern={r".*q_proj": float("nan")}),
        without_ranks,
        lambda: config.update(r=0),
        lambda: multiplied(10 ** rng.uniform(0, 38)),
        lambda: multiplied(1e-40),
        lambda: None,
    ]
    kinds[number % len(kinds)]()
    return Lora(config, tensors)


class Fixed(Estimates):
    """Nor are the host's seconds measured."""

    observe_plan = observe_collect = Estimates.observe


class Mixed:
    """An engine with two healthy adapters, whose requests and those of the model are compared.

    Attributes:
        rejected, broken: hostile adapters that were not loaded, and those whose answers were not finite.
    """

    def __init__(self, engine: Engine, variant: str) -> None:
        self.engine, self.variant, self.rejected, self.broken = engine, variant, 0, 0
        self._healthy = {name: lora(variant, kind, name) for name, kind in (("x", "plain"), ("y", "rs"))}
        self._before = self.answers({})

    def check(self, numbers: Sequence[int]) -> None:
        """Runs these hostile adapters, and compares."""
        others = {str(number): hostile(self.variant, number) for number in numbers}
        others = {name: adapter for name, adapter in others.items() if self._is_read(name, adapter)}
        self.rejected += len(numbers) - len(others)
        harmless = self.answers({name: lora(self.variant, "plain", f"{name} harmless") for name in others})
        assert self.answers(others) == harmless
        assert self.answers({}) == self._before

    def _is_read(self, name: str, adapter: Lora) -> bool:
        try:
            load(self.engine, name, adapter)
        except ModelError:
            return False
        self.engine.do(UnloadLora(name))
        return True

    def answers(self, others: Mapping[str, Lora]) -> list[Any]:
        """Of the model's requests and those of healthy adapters, beside others. Each time, adapters get the
        same places, and a new scheduler makes the same steps.
        """
        engine = self.engine
        # the same steps each time: no plan depends on this machine's clock
        clock = count(1.0, 1e-3).__next__
        restart_scheduler(engine, num_pages=PAGES, costs=Fixed(engine.scheduler.table), clock=clock)
        adapters = {**self._healthy, **others}
        for name, adapter in adapters.items():
            load(engine, name, adapter)
        names = [None, *self._healthy, None, *others, None, *self._healthy, None]
        # every second request has the same prompt; states are kept at the ends of tiles alone
        texts = prompts(2, 70 if self.variant == "qwen3_next" else 21, engine.model.vocab_size)
        work = [(texts[i % 2], PARAMS[(i + len(names)) % len(PARAMS)], name) for i, name in enumerate(names)]
        hits, found = engine.scheduler.prefixes.hits, []
        for _ in range(2):
            for (_, _, name), answer in zip(work, run_adapted(engine, work), strict=True):
                result = result_of(answer)
                if name not in others:
                    assert np.isfinite(result[1]).all()
                    found.append(result)
                elif not np.isfinite(result[1]).all():
                    self.broken += 1
        assert engine.scheduler.prefixes.hits > hits
        for name in adapters:
            engine.do(UnloadLora(name))
        return found


def result_of(answer: Answer) -> tuple[list[int], list[float]]:
    """Tokens, and all log probabilities of the answer and of its prompt."""
    every = [update.logprobs for update in answer.updates]
    every += [one for part in answer.scores for one in part.logprobs]
    return answer.tokens, [
        number
        for one in every
        if one is not None
        for number in (one.chosen, *(logprob for _, logprob in one.top))
    ]


def mixed(
    make_engine: Callable[..., Engine], dtype: str, *, invariant: bool, variant: str = "llama_gqa"
) -> Mixed:
    options: dict[str, Any] = {"enable_lora": True, "max_loras": 4, "max_lora_rank": 8, "num_pages": PAGES}
    # which tokens are drafted depends on answers, and bits on that, unless they are invariant
    options |= {**OPTIONS, "num_pages": PAGES} if invariant else {"speculative_config": None}
    engine = make_engine(variant, optimized=True, dtype=dtype, **options, **TARGETS.get(variant, {}))
    return Mixed(engine, variant)


@pytest.mark.parametrize(("dtype", "invariant"), [("float16", False), ("float32", True)])
def test_answers_do_not_depend_on_hostile_adapters(
    dtype: str, invariant: bool, make_engine: Callable[..., Engine]
) -> None:
    one = mixed(make_engine, dtype, invariant=invariant)
    for start in range(0, 12, AT_ONCE):
        one.check(range(start, start + AT_ONCE))
    assert one.rejected > 3 and one.broken > 2


@pytest.mark.full
@pytest.mark.parametrize(
    ("dtype", "invariant"),
    # a CPU's products of float16 are not batch invariant
    [("float32", False), ("float32", True), ("bfloat16", False), ("bfloat16", True), ("float16", False)],
)
def test_three_hundred_adapters(dtype: str, invariant: bool, make_engine: Callable[..., Engine]) -> None:
    one = mixed(make_engine, dtype, invariant=invariant)
    for start in range(0, 300, AT_ONCE):
        one.check(range(start, start + AT_ONCE))
    assert one.rejected > 75 and one.broken > 30
    print(f"{dtype}, invariant {invariant}: {one.rejected} rejected, {one.broken} answers not finite")


@pytest.mark.full
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("variant", ["qwen3_moe", "qwen2_tied", "qwen3_next"])
def test_experts_heads_and_states(variant: str, invariant: bool, make_engine: Callable[..., Engine]) -> None:
    """What adapters change besides dense products, and states in place of keys and values."""
    one = mixed(make_engine, "bfloat16", invariant=invariant, variant=variant)
    for start in range(0, 48, AT_ONCE):
        one.check(range(start, start + AT_ONCE))
    assert one.rejected > 12 and one.broken > 5
    print(f"{variant}, invariant {invariant}: {one.rejected} rejected, {one.broken} answers not finite")
