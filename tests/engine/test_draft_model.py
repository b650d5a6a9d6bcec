"""A draft model changes no token, whatever it proposes; its keys and values are complete wherever the model's
are.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.restart import restart_scheduler
from jengine.base.errors import InvalidArgument
from jengine.capacity.simulation.setup import Setup
from jengine.core.config import EngineConfig
from jengine.core.request import SamplingParams
from jengine.engine.loop.engine import Engine
from jengine.engine.setup.shapes import describe_engine
from jengine.engine.start import start_engine
from jengine.scheduling.costs.draft_costs import all_of_them
from jengine.table.program_table import DraftKey
from tests.engine.running import SMALL, Work, limit_pages, requests_of, run
from tests.engine.test_speculation import OPTIONS, check_equal, work
from tests.golden.weights import write_model

ALL: dict[str, Any] = {"how_many_drafts": all_of_them}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Writes a tiny model; returns its folder."""
    root: Path = tmp_path_factory.mktemp("drafts")

    def write(variant: str, **changes: Any) -> str:
        name = root / "-".join([variant, *changes])
        if not name.exists():
            write_model(name, variant, **changes)
        return str(name)

    return write


def drafts_of(model: str, tokens: int = 4) -> dict[str, Any]:
    return {"speculative_config": {"method": "draft_model", "model": model, "num_speculative_tokens": tokens}}


def greedy(count: int, most: int = 40, tokens: int = 24) -> list[Work]:
    draw = random.Random(3)
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    return [([draw.randrange(64) for _ in range(draw.randint(1, most))], params) for _ in range(count)]


def accepted(engine: Engine) -> tuple[int, int]:
    speculation = engine.scheduler.speculation
    return sum(speculation.accepted), speculation.tokens


def test_the_same_model_is_always_right(make_engine: Callable[..., Engine], folder: Any) -> None:
    """Alone, beside others, after a prefix hit, and after preemptions: so its keys are never missing."""
    plain = make_engine(**OPTIONS)
    engine = make_engine(**OPTIONS, **drafts_of(folder("llama_gqa")))
    restart_scheduler(engine, **ALL)
    check_equal(run(engine, greedy(3)), expected := run(plain, greedy(3)))
    right, drafted = accepted(engine)
    assert right == drafted > 40
    check_equal(run(engine, greedy(3)), expected)
    shared: list[Work] = [([*range(32), *prompt], params) for prompt, params, *_ in greedy(6, most=8)]
    check_equal(run(engine, shared), run(plain, shared))
    assert engine.scheduler.prefixes.hits > 64
    right, drafted = accepted(engine)
    assert right == drafted > 100
    limit_pages(engine, 9)
    restart_scheduler(engine, **ALL)
    tight = greedy(4, most=20, tokens=60)
    check_equal(run(engine, tight), run(plain, tight))
    assert engine.scheduler.registry.num_preemptions > 0
    right, drafted = accepted(engine)
    assert right == drafted > 20
    assert engine.compiles_since_start == 0 and engine.scheduler.blocks.owned == 0


@pytest.mark.parametrize("tokens", [1, 5])
def test_another_model(tokens: int, make_engine: Callable[..., Engine], folder: Any) -> None:
    """Random weights are hardly ever right. Sampled, penalized, masked and scored tokens are as without."""
    plain = run(make_engine(**OPTIONS), work(random.Random(5), 12))
    engine = make_engine(**OPTIONS, **drafts_of(folder("gpt2"), tokens))
    restart_scheduler(engine, **ALL)
    check_equal(run(engine, work(random.Random(5), 12)), plain)
    right, drafted = accepted(engine)
    assert drafted > 40 and right < drafted // 3
    assert {step.sampler.variant for step in engine.records.steps} >= {"full", "truncated"}
    (one,) = run(engine, [([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=30))])
    assert len(one.tokens) == 30


def test_an_abort_between_drafts(make_engine: Callable[..., Engine], folder: Any) -> None:
    plain = run(make_engine(**OPTIONS), greedy(4))
    engine = make_engine(**OPTIONS, **drafts_of(folder("llama_gqa")))
    restart_scheduler(engine, **ALL)
    requests = [
        one for i, (ids, params, *_) in enumerate(greedy(4)) for one in requests_of(str(i), ids, params)
    ]
    sequences = [sequence for request in requests for sequence in engine.add(request)]
    steps = 0
    while engine.has_work:
        engine.step()
        engine.scheduler.check_integrity()
        steps += 1
        if steps == 3:
            assert engine.end("1.0", "abort")
    for sequence, answer in zip(sequences, plain, strict=True):
        tokens = sequence.output_token_ids
        ended = sequence.finish_reason == "abort"
        assert tokens == (answer.tokens[: len(tokens)] if ended else answer.tokens)
    assert [sequence.finish_reason for sequence in sequences].count("abort") == 1
    assert engine.scheduler.blocks.owned == 0


@pytest.mark.parametrize(
    "variant, draft, options",
    [
        ("gemma3", "llama_gqa", {}),  # several cache groups
        ("llama_gqa", "gemma3", {}),  # a draft model with windows
        ("llama_gqa", "deepseek_v3", {"kv_cache_dtype": "int8"}),
        ("llama_gqa", "llama_gqa", {"swap_space": 0.05, "num_pages": 20}),
        ("llama_gqa", "llama_gqa", {"batch_invariant": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
@pytest.mark.full
def test_with_everything_else(
    variant: str, draft: str, options: dict[str, Any], make_engine: Callable[..., Engine], folder: Any
) -> None:
    changes = {**OPTIONS, **options}
    plain = run(make_engine(variant, **changes), work(random.Random(5), 24))
    engine = make_engine(variant, **changes, **drafts_of(folder(draft)))
    restart_scheduler(engine, **ALL)
    check_equal(run(engine, work(random.Random(5), 24)), plain)
    assert accepted(engine)[1] > 30 and engine.compiles_since_start == 0


@pytest.mark.full
def test_for_a_model_with_recurrent_states(make_engine: Callable[..., Engine], folder: Any) -> None:
    plain = run(make_engine("qwen3_next", **OPTIONS), work(random.Random(5), 8))
    engine = make_engine("qwen3_next", **OPTIONS, **drafts_of(folder("llama_gqa", vocab_size=64)))
    restart_scheduler(engine, **ALL)
    check_equal(run(engine, work(random.Random(5), 8)), plain)
    assert accepted(engine)[1] > 30 and engine.compiles_since_start == 0


def test_a_whole_start(tmp_path: Path, folder: Any, make_engine: Callable[..., Engine]) -> None:
    """Everything is compiled ahead, and the costs of drafts are measured."""
    options = {**SMALL, "max_num_seqs": 4, "max_num_batched_tokens": 68, "max_model_len": 96}
    options |= {"dtype": "float32", "cache_dir": str(tmp_path)}
    config = EngineConfig.of(folder("llama_gqa"), {**options, **drafts_of(folder("llama_gqa"), 3)})
    engine, started = start_engine(config, progress=False)
    costs = engine.scheduler.predictor.costs
    keys = engine.scheduler.table.draft_keys()
    assert [*keys] == [DraftKey(rows, 3) for rows in engine.scheduler.table.sample_buckets]
    assert all(costs.known[key].seconds > 0 for key in keys)
    run(engine, greedy(2, most=20))
    assert engine.compiles_since_start == 0 and started.programs_compiled == started.programs
    assert engine.memory_parts()["weights"] > 0
    engine.close()
    again, loaded = start_engine(config, progress=False)
    assert loaded.programs_compiled == 0 and all(key in again.scheduler.predictor.costs.known for key in keys)
    again.close()


def test_pages_hold_the_keys_of_both_models(folder: Any) -> None:
    model = folder("llama_gqa")
    options = {**SMALL, "max_model_len": 96, "dtype": "float32"}
    _, plain = describe_engine(EngineConfig.of(model, options))
    _, both = describe_engine(EngineConfig.of(model, {**options, **drafts_of(model)}))
    assert both.page_bytes == 2 * plain.page_bytes and both.drafting is not None
    assert both.drafting.page_bytes == plain.page_bytes
    assert both.fingerprint() != plain.fingerprint()


@pytest.mark.parametrize(
    "variant, draft, changes, options, says",
    [
        ("llama_gqa", "llama_mqa", {}, {}, "model='llama': has 101 tokens in its vocabulary, but the model"),
        ("llama_gqa", "qwen3_next", {"vocab_size": 96}, {}, "its layers keep recurrent states"),
        ("qwen3_next", "qwen3_next", {}, {}, "its layers keep recurrent states"),
        ("llama_gqa", "llama_gqa", {"max_position_embeddings": 64}, {}, "has 64 positions, fewer than"),
        ("llama_gqa", "llama_gqa", {}, {"num_scheduler_steps": 8}, "num_scheduler_steps=8: must be 1 with a"),
    ],
)
def test_what_is_refused(
    variant: str, draft: str, changes: dict[str, Any], options: dict[str, Any], says: str, folder: Any
) -> None:
    all_options = {**SMALL, "max_model_len": 96, **options, **drafts_of(folder(draft, **changes))}
    with pytest.raises(InvalidArgument) as refused:
        describe_engine(EngineConfig.of(folder(variant), all_options))
    assert says in str(refused.value)


def test_simulations_draft_with_no_model(folder: Any) -> None:
    config = EngineConfig.of(folder("llama_gqa"), {**SMALL, **drafts_of(folder("llama_gqa"))})
    with pytest.raises(InvalidArgument, match=r"drafts_right=0\.5: must be 0 with a draft model"):
        Setup.of(config, drafts_right=0.5)
