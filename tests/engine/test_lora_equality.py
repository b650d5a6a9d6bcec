"""Random requests with adapters answer as the models that have these merged into their weights, whatever else
steps do.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from jengine.core.request import RequestOutput
from jengine.core.scheduling_options import SchedulingOptions
from jengine.scheduling.drafters.choice import drafters_of
from jengine.scheduling.drafters.drafter import Drafter
from tests.engine.equality import Guessing, Job, Silent, compare, random_jobs
from tests.engine.loras import load
from tests.engine.test_speculation_equality import NGRAM, Compared, method_of, text_model
from tests.golden.loras import lora, write_merged

LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
ADAPTERS = {"a": "plain", "b": "rs", "c": "plain"}  # one more than there are places
# the model, the engine's options, and the pages of its cache that are used
SETTINGS: dict[str, tuple[str, dict[str, Any], int]] = {
    "few pages": ("llama_tied", {"dtype": "float32", "policy": "priority"}, 16),
    "host tier, bursts": (
        "llama_tied",
        {"dtype": "float32", "swap_space": 0.05, "num_scheduler_steps": 8},
        16,
    ),
    "windows": ("gemma3", {"dtype": "float32"}, 30),
    "draft model": ("llama_tied", {"dtype": "float32", "swap_space": 0.05}, 24),
    "mtp": ("mimo", {"dtype": "float32"}, 24),
    "eagle3": ("llama_tied", {"dtype": "float32", "policy": "priority"}, 16),
    "invariant": ("llama_tied", {"dtype": "bfloat16", "batch_invariant": True}, 24),
}


class Adapted:
    """An engine with adapters, and for each adapter what it is compared with, by the adapter's name: an
    engine over the merged model or, to the last bit, itself with this adapter alone.
    """

    def __init__(self, root: Path, setting: str) -> None:
        variant, options, pages = SETTINGS[setting]
        method, options = method_of(setting), {**options, **LORA}
        folder = text_model(root, variant, method)
        self.one = Compared(folder, options, pages, method)
        self.alone: dict[str | None, Compared] = {None: self.one}
        config = json.loads((folder / "config.json").read_text())
        for name, kind in ADAPTERS.items():
            adapter = lora(variant, kind, name, config=config)
            load(self.one.engine, name, adapter)
            if self.one.exact:
                self.alone[name] = self.one
                continue
            merged = folder.with_name(f"{folder.name}+{name}")
            if not merged.exists():
                write_merged(merged, folder, adapter)
            self.alone[name] = Compared(merged, options, pages, method)

    def jobs(self, count: int, seed: int) -> list[Job]:
        """A quarter of them for each adapter, and for none. Each prompt comes twice, perhaps with another
        adapter.
        """
        draw, names = random.Random(seed), [*self.alone] * -(-count // len(self.alone))
        draw.shuffle(names)
        jobs = random_jobs(-(-count // 2), vocab=self.one.vocab, seed=seed)
        return [replace(job, lora=name) for job, name in zip([*jobs, *jobs][:count], names, strict=False)]

    def expected(self, name: str | None, jobs: list[Job]) -> list[RequestOutput]:
        """What the requests of one adapter answer, without drafts."""
        if not self.one.exact:
            jobs = [replace(job, lora=None) for job in jobs]
        return self.alone[name].outputs(jobs, [Silent()], 24, 0)

    def check(self, count: int, seed: int, drafters: dict[str, List[Drafter]]) -> dict[str, tuple[int, int]]:
        """Compares the answers, once with each drafter. Returns how many tokens were drafted and accepted."""
        jobs, one, found, excused = self.jobs(count, seed), self.one, dict[str, tuple[int, int]](), 0
        each = {name: [job for job in jobs if job.lora == name] for name in self.alone}
        expected = {name: self.expected(name, own) for name, own in each.items()}
        one.preempted = one.fetched = 0
        for number, (drafting, those) in enumerate(drafters.items()):
            got = one.outputs(jobs, those, (24, 9)[number % 2], seed + number)
            for name, own in each.items():
                answers = [output for output, job in zip(got, jobs, strict=True) if job.lora == name]
                judge = None if one.exact else self.alone[name].judge
                excused += compare(answers, expected[name], own, judge)
            speculation = one.engine.scheduler.speculation
            found[drafting] = speculation.tokens, sum(speculation.accepted)
        assert excused * 500 <= len(drafters) * count, "rounding does not explain as many differences"
        return found


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Adapted]:
    root: Path = tmp_path_factory.mktemp("models")
    return cache(lambda setting: Adapted(root, setting))


def ngram() -> List[Drafter]:
    return drafters_of(SchedulingOptions(speculative_config=NGRAM))


def test_few_pages_and_drafts(adapted: Callable[[str], Adapted]) -> None:
    one = adapted("few pages")
    drafted, accepted = one.check(16, 1, {"ngram": ngram()})["ngram"]
    assert drafted > accepted > 1 and one.one.preempted > 1


@pytest.mark.full
@pytest.mark.parametrize("setting", SETTINGS)
def test_with_each_drafter(setting: str, adapted: Callable[[str], Adapted]) -> None:
    one, count = adapted(setting), 24
    drafters = {"none": [Silent()], "ngram": ngram(), "random": [Guessing(one.one.vocab, 2)]}
    if one.one.method is not None:
        drafters["own"] = drafters_of(one.one.engine.scheduler.options)
    found = one.check(count, 2, drafters)
    assert found.pop("none") == (0, 0)
    assert all(drafted > count for drafted, _ in found.values()), found
    assert found["ngram"][1] > count // 10
    assert one.one.preempted > count // 10 or setting not in ("few pages", "eagle3")
    assert one.one.fetched > count // 10 or "host tier" not in setting
