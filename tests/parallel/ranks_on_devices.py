"""Ranks that share experts. test_many_devices.py runs this as it runs many_devices.py."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jengine.core.config import EngineConfig
from jengine.core.request import SamplingParams
from jengine.core.updates import Ended, TokenUpdate
from jengine.engine.ranks import RankedEngine
from jengine.engine.start import start_engine
from jengine.execution.programs import Programs
from tests.engine.invariance import OPTIONS, random_work
from tests.engine.on_demand import on_demand
from tests.engine.running import SMALL, Work, limit_pages, requests_of
from tests.engine.running import run as answers_of
from tests.execution.specs import make_spec, temporaries_bound
from tests.golden.weights import Golden, max_model_len, write_model
from tests.parallel.many_devices import collectives, in_loops, text_of

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
MESHES = [(2, 1), (2, 2), (4, 1), (2, 4), (4, 2), (8, 1)]


def started(folder: Path, variant: str, data: int, tensor: int, **options: Any) -> RankedEngine:
    write_model(folder, variant)
    config = {
        **SMALL,
        "max_model_len": max_model_len(variant),
        "dtype": "float32",
        "data_parallel_size": data,
        "tensor_parallel_size": tensor,
        "enable_expert_parallel": True,
        **options,
    }
    engine, _ = start_engine(EngineConfig.of(str(folder), config), progress=False)
    assert isinstance(engine, RankedEngine) and len(engine.ranks) == data
    return engine


def run(
    engine: RankedEngine,
    work: list[Work],
    *,
    at_once: int = 64,
    rank: int | None = None,
    seed: int | None = None,
) -> list[list[Any]]:
    """The tokens of each sample, with their log probabilities. Checks that each request ends once.

    Args:
        rank: that gets all prompts; None: as the engine chooses, or with a seed at random.
    """
    rng, found, ends = np.random.default_rng(seed), defaultdict[str, list[Any]](list), Counter[str]()
    left, unfinished = [*range(len(work))][::-1], 0
    while left or engine.has_work:
        while left and unfinished < at_once:
            number, choice = left.pop(), rank
            if seed is not None:
                choice = int(rng.integers(len(engine.ranks)))
            requests = requests_of(str(number), *work[number])
            (engine if choice is None else engine.ranks[choice]).add(*requests)
            unfinished += len(requests)
            if seed is not None and rng.random() < 0.4:
                break
        for update in engine.step():
            assert isinstance(update, TokenUpdate | Ended) and not ends[update.request_id]
            if isinstance(update, TokenUpdate):
                found[update.request_id].append((update.token, update.logprobs))
            if isinstance(update, Ended) or update.finish_reason is not None:
                ends[update.request_id] += 1
                unfinished -= 1
        for one in engine.ranks:
            one.scheduler.check_integrity()
    assert all(one.scheduler.blocks.owned == 0 for one in engine.ranks) and engine.compiles_since_start == 0
    samples = [f"{i}.{n}" for i, (_, how) in enumerate(work) for n in range(how.n)]
    assert ends == dict.fromkeys(samples, 1)
    return [found[name] for name in samples]


def check_goldens(engine: RankedEngine, variant: str) -> None:
    cases = Golden.read(variant).cases
    work = [(case.prompt.tolist(), GREEDY) for case in cases]
    expected = [case.tokens.tolist() for case in cases]
    # all ranks at work, then only the last one
    for how in ({}, {"rank": len(engine.ranks) - 1, "at_once": 2}):
        found = run(engine, work, **how)
        assert [[token for token, _ in one] for one in found] == expected
    asked = sum(one.scheduler.prefixes.queries > 0 for one in engine.ranks)
    assert asked >= min(len(engine.ranks), len(cases))


@pytest.mark.parametrize(
    ("variant", "data", "tensor"),
    [
        ("deepseek_v2", 2, 1),
        *(
            pytest.param(variant, *mesh, marks=pytest.mark.full)
            for variant in ("qwen3_moe_mixed", "deepseek_v3", "gpt_oss", "qwen3_next", "gemma4_text")
            for mesh in MESHES
        ),
    ],
)
def test_tokens(variant: str, data: int, tensor: int, tmp_path: Path) -> None:
    with on_demand():
        engine = started(tmp_path, variant, data, tensor)
    check_goldens(engine, variant)
    check_all_kinds(engine)


def check_all_kinds(engine: RankedEngine) -> None:
    """Requests of all kinds end once, whatever ranks they are on, with pages for a few."""
    for rank in engine.ranks:
        limit_pages(rank, 1 + rank.scheduler.limits.most_pages(130))
    vocab = engine.ranks[0].model.vocab_size
    work = [
        ([int(token) for token in np.random.default_rng(i).integers(0, vocab, 1 + i % 90)], how)
        for i, (_, how) in enumerate(random_work(14, vocab=vocab, seed=5))
        if how.prompt_logprobs is None and how.max_tokens is not None and how.max_tokens <= 20
    ]
    run(engine, work, at_once=12, seed=1)
    assert len({len(rank.records.steps) for rank in engine.ranks}) > 1, "all had equal loads"


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:quantization='fp8' is emulated")
@pytest.mark.parametrize("quantization", ["int4", "int8", "w8a8", "fp8"])
def test_quantized_experts(quantization: str, tmp_path: Path) -> None:
    """All weights are those of one device."""
    work = [(case.prompt.tolist(), GREEDY) for case in Golden.read("qwen3_moe").cases]
    how = {"quantization": quantization, "dtype": "float32", **SMALL}
    write_model(tmp_path, "qwen3_moe")
    with on_demand():
        one, _ = start_engine(EngineConfig.of(str(tmp_path), {**how, "max_model_len": 192}), progress=False)
        many = started(tmp_path, "qwen3_moe", 4, 1, **how, max_model_len=192)
    expected = [answer.tokens for answer in answers_of(one, work)]
    assert [[token for token, _ in answer] for answer in run(many, work)] == expected


@pytest.mark.full
@pytest.mark.parametrize(
    ("data", "tensor", "stages"), [(2, 1, 1), (2, 2, 1), (4, 1, 1), (3, 1, 1), (2, 1, 2), (2, 2, 2)]
)
@pytest.mark.parametrize("variant", ["qwen3_moe", "deepseek_v2"])
def test_bits_do_not_depend_on_other_ranks(
    variant: str, data: int, tensor: int, stages: int, tmp_path: Path
) -> None:
    options = {**OPTIONS, "max_model_len": 192, "dtype": "bfloat16", "pipeline_parallel_size": stages}
    with on_demand(optimized=True):
        engine = started(tmp_path, variant, data, tensor, **options)
    work = [
        (prompt, how)
        for prompt, how in random_work(40, vocab=engine.ranks[0].model.vocab_size, seed=3)
        if how.prompt_logprobs is None
    ]
    alone = run(engine, work, at_once=1, rank=0)
    assert run(engine, work, at_once=1, rank=data - 1) == alone
    assert run(engine, work, at_once=40) == alone
    assert run(engine, work, at_once=20, seed=4) == alone


def test_a_trunk_gathers_and_scatters_once_for_each_layer_with_experts() -> None:
    spec = make_spec("qwen3_moe", devices=2, ranks=2, expert_parallel=True)
    key, layers = spec.table.trunks()[-1], spec.model.config.num_layers
    compiled = Programs(spec, None, threads=2, progress=False, first=[key])
    text = text_of(compiled[key])
    assert collectives(compiled[key]) == {
        "all-reduce": 2 * layers + 1,
        "all-gather": layers,
        "reduce-scatter": layers,
    }
    assert not in_loops(compiled[key])
    groups = re.findall(r" (all-\w+|reduce-scatter)\(.*replica_groups=(\S+?)[ ,]", text)
    assert {kind for kind, _ in groups} == {"all-reduce", "all-gather", "reduce-scatter"}
    memory = compiled.memory[key]
    own = [
        int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize for x in jax.tree.leaves(spec.cache)
    ]
    assert memory.aliased >= sum(own) == spec.cache_bytes, "each rank's cache is updated in place"
    assert memory.temporaries <= temporaries_bound(spec, key)
