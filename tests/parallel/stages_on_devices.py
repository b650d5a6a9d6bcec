"""Pipelines on eight devices of a CPU; test_many_devices.py runs these in a process."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import pytest

from jengine import InvalidArgument
from jengine.checkpoints import read_config
from jengine.core.config import EngineConfig
from jengine.core.request import MAX_LOGPROBS, SamplingParams
from jengine.engine.loop.engine import Engine
from jengine.engine.operations import ResetPrefixCache, Sleep, WakeUp
from jengine.engine.start import start_engine
from jengine.execution.kinds import DeviceCall, call_kind
from jengine.execution.programs import Programs
from jengine.models import build
from jengine.models.stages import check_divisible, part_of, stages_of
from jengine.parallel.layout import Layout
from jengine.parallel.mesh import stage_meshes
from jengine.scheduling.costs.step_costs import SwapCosts
from tests.engine.invariance import OPTIONS, check_invariance
from tests.engine.on_demand import on_demand
from tests.engine.running import SMALL, Answer, limit_pages, run
from tests.engine.test_golden import assert_equal
from tests.execution.specs import make_spec
from tests.golden.weights import VARIANTS, Golden, max_model_len, write_model
from tests.parallel.many_devices import collectives, in_loops

# What differs between families: learned positions and tied tables on both ends, slopes, windows, scaled
# queries, norms, latent attention, experts, recurrent states, convolutions.
VARIED = [
    "exaone4", "llama_tied", "gpt2", "opt_125m", "opt_350m", "bloom", "ministral3", "llama4_text",
    "gemma2", "gemma3", "cohere2", "gpt_oss", "qwen3_moe_mixed", "deepseek_v3", "qwen3_next_mixed", "lfm2",
    "minimax", "olmo3", "smollm3", "qwen3_5_text",
]  # fmt: skip
FULL = pytest.mark.full
LAYOUTS = [(2, 1), (2, 2), (4, 1), (4, 2)]


def start(folder: Path, variant: str, stages: int, tensor: int = 1, **options: Any) -> Engine:
    every = {
        **SMALL,
        "max_model_len": max_model_len(variant),
        "tensor_parallel_size": tensor,
        "pipeline_parallel_size": stages,
        "dtype": "float32",
        **options,
    }
    with on_demand():
        return start_engine(EngineConfig.of(str(folder), every), progress=False)[0]


def check_answers(engine: Engine, variant: str) -> list[Answer]:
    """Greedy tokens and log probabilities are the model's, for prompts that run together and then again,
    from the cache. Most steps overlap with others.
    """
    cases, overtaken = Golden.read(variant).cases, 0
    params = [
        SamplingParams(temperature=0.0, max_tokens=len(case.tokens), ignore_eos=True, logprobs=MAX_LOGPROBS)
        for case in cases
    ]
    work = [(case.prompt.tolist(), how) for case, how in zip(cases, params, strict=True)]

    def count() -> None:
        nonlocal overtaken
        overtaken += len(engine._in_flight) > 1

    found: list[Answer] = []
    for _ in range(2):
        found = run(engine, work, count)
        for answer, case in zip(found, cases, strict=True):
            assert_equal(answer, case)
    assert overtaken > 10 and engine.compiles_since_start == 0
    engine.scheduler.check_integrity()
    return found


@pytest.mark.full
@pytest.mark.parametrize(("stages", "tensor"), LAYOUTS)
@pytest.mark.parametrize("variant", VARIED)
def test_stages_give_the_models_tokens(variant: str, stages: int, tensor: int, tmp_path: Path) -> None:
    write_model(tmp_path, variant)
    if stages > (layers := read_config(tmp_path).num_layers):
        pytest.skip(f"{variant} has {layers} layers")
    check_answers(start(tmp_path, variant, stages, tensor), variant)


def count_calls(engine: Engine) -> Counter[str]:
    """The calls that the engine will have made, by kind."""
    worker: Any = engine.runner.worker  # type: ignore[attr-defined]
    calls, execute = Counter[str](), worker.execute

    def counting(call: DeviceCall) -> Any:
        calls[call_kind(call.key).name] += 1
        return execute(call)

    worker.execute = counting
    return calls


def test_all_kinds_of_requests_in_stages(tmp_path: Path) -> None:
    """Samples that share pages, masks, penalties, scored prompts, preemptions, pages that go to the host and
    come back, and sleep: tokens are those of one device.
    """
    write_model(tmp_path, "exaone4")
    one, staged = (start(tmp_path, "exaone4", stages, swap_space=0.01) for stages in (1, 2))
    greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    starts = ((3, 40), (9, 70), (20, 3), (1, 17))
    prompts = [[at * 7 % 61 + 3 for at in range(first, first + length)] for first, length in starts]
    work = [
        *[(prompt, greedy) for prompt in prompts],
        (prompts[0], SamplingParams(temperature=0.9, seed=7, n=3, max_tokens=12)),
        (prompts[1], SamplingParams(temperature=0.0, max_tokens=12, repetition_penalty=1.4, logprobs=2)),
        (prompts[1], SamplingParams(temperature=0.0, max_tokens=12, allowed_token_ids=[3, 5, 8, 13, 21])),
        (prompts[2], SamplingParams(temperature=0.0, max_tokens=5, prompt_logprobs=2)),
    ]

    def tokens(engine: Engine) -> list[list[int]]:
        return [answer.tokens for answer in run(engine, work)]

    expected = tokens(one)
    assert tokens(staged) == expected == tokens(staged)
    # six that grow at once have no room, so some are preempted, and their pages go to the host
    growing = [([at * 5 % 61 + 3 for at in range(first, first + 15)], greedy) for first in range(0, 60, 10)]
    alone = [answer.tokens for answer in run(one, growing)]
    limit_pages(staged, 27)
    staged.scheduler.predictor.costs.swaps = SwapCosts(0.0, 0.0, 0.0)
    calls = count_calls(staged)
    assert [answer.tokens for answer in run(staged, growing * 2)] == alone * 2
    assert staged.scheduler.registry.num_preemptions > 0 and min(calls["spill"], calls["fill"]) > 0
    assert staged.compiles_since_start == 0
    staged.do(ResetPrefixCache())
    staged.do(Sleep(1))
    staged.do(WakeUp())
    assert tokens(staged) == expected


def test_programs_of_stages_have_the_collectives_that_were_written() -> None:
    """Stages of two devices: two sums a layer, one for the embedding, and those of the sampler. A stage has
    only its layers' weights.
    """
    spec = make_spec("exaone4", devices=2)
    stages = stages_of(spec.model, (1, 3))
    spec = dataclasses.replace(
        spec, pipeline=tuple(zip(stages, stage_meshes(Layout(stages=2, tensor=2)), strict=True))
    )
    for stage in spec.stages:
        compiled, own = Programs(stage, None, threads=2, progress=False), stage.stage
        for key in spec.table.trunks():
            sums = 2 * len(own.layers) + own.first
            assert collectives(compiled[key]) == {"all-reduce": sums}, (key, own)
            assert not in_loops(compiled[key])
        samplers = [key for key in spec.table.samplers() if key in compiled]
        assert bool(samplers) == own.last
        for key in samplers:
            assert collectives(compiled[key]) == {"all-to-all": 1, "all-gather": 1}, key
        assert stage.params["layers"].keys() == {*own.layers}


@pytest.mark.parametrize(
    ("stages", "count"), [(2, 12), pytest.param(2, 200, marks=FULL), pytest.param(4, 50, marks=FULL)]
)
def test_bits_do_not_depend_on_the_batch_in_stages(stages: int, count: int, tmp_path: Path) -> None:
    write_model(tmp_path, "exaone4")
    options = {**SMALL, **OPTIONS, "max_model_len": 192, "dtype": "float32", "pipeline_parallel_size": stages}
    with on_demand():
        engine = start_engine(EngineConfig.of(str(tmp_path), options), progress=False)[0]
    check_invariance(engine, count, seed=3, stages=stages)


@pytest.mark.parametrize(
    "options",
    [
        {"enable_lora": True},
        {"weight_updates": True},
        {"strategy": "latency"},
        {"num_scheduler_steps": 8},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"pipeline_layers": "1,1"},
    ],
)
def test_what_a_pipeline_lacks_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    write_model(tmp_path, "exaone4")
    with pytest.raises(InvalidArgument, match=f"^{next(iter(options))}=.*: must "):
        start(tmp_path, "exaone4", 2, **options)


def test_families_that_cannot_be_divided_are_named(tmp_path: Path) -> None:
    """All others have their layers and parameters in exactly one stage, but for tied tables."""
    refused = set()
    for variant in VARIANTS:
        folder = tmp_path / variant
        write_model(folder, variant)
        model = build(read_config(folder), "float32", 64)
        try:
            check_divisible(model, 2)
        except InvalidArgument as error:
            assert "must be 1 with" in str(error)
            refused.add(model.config.family)
            continue
        layers = model.config.num_layers
        parts = [part_of(model, stage) for stage in stages_of(model, (1, layers - 1))]
        count = sum(len(jax.tree.leaves(part.params)) for part in parts)
        tied = len(jax.tree.leaves(model.params["embed"])) if model.module.lm_head is None else 0
        assert count == len(jax.tree.leaves(model.params)) + tied, variant
    # the tiny models of gemma4 have embeddings for each layer, as the smaller ones of the family do
    assert refused == {"gemma3n", "gemma3n_text", "gemma4", "gemma4_text"}
