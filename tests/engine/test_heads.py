"""Heads that draft, MTP and EAGLE-3: they change no token, and read the states that they were trained to."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.restart import restart_scheduler
from jengine.base.errors import InvalidArgument, ModelError
from jengine.core.config import EngineConfig
from jengine.core.request import SamplingParams
from jengine.core.speculation import Speculation
from jengine.engine.loop.engine import Engine
from jengine.engine.setup.model_source import ModelSource, build_draft
from jengine.engine.setup.shapes import describe_engine
from jengine.engine.start import start_engine
from jengine.execution.memory import device_bytes
from jengine.scheduling.costs.draft_costs import all_of_them
from tests.engine.on_demand import on_demand
from tests.engine.running import SMALL, Estimates, Work, limit_pages, run
from tests.engine.test_speculation import OPTIONS, check_equal, work
from tests.golden.heads import mtp_config, mtp_weights, ruled, write_eagle3, write_folder, write_mtp
from tests.golden.variants import VARIANTS
from tests.golden.weights import weights, write_model

GOLDEN = Path(__file__).parent.parent / "golden"
EAGLE = "llama_gqa"  # the model of the EAGLE-3 head
LENGTH = 192


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """Writes a tiny model with a head; returns the options that name both."""
    root: Path = tmp_path_factory.mktemp("heads")

    def write(name: str, *, follows: bool = False, tokens: int = 4) -> dict[str, Any]:
        folder = root / f"{name}-{follows}"
        how: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": tokens}
        changes: dict[str, Any] = {"vocab_size": 64} if follows else {}
        if name == "eagle3":
            how |= {"method": "eagle3", "model": str(folder / "head")}
        if folder.exists():
            pass
        elif name == "eagle3":
            config = {**VARIANTS[EAGLE], **changes}
            found = weights(EAGLE, config)
            write_folder(folder, config, ruled(found, config) if follows else found)
            more = {**changes, "norm_before_residual": True} if follows else {}
            write_eagle3(folder / "head", EAGLE, follows=follows, **more)
        else:
            write_mtp(folder, name, follows=follows, **changes)
        return {"model": str(folder), "speculative_config": how}

    return write


def started(options: dict[str, Any], **more: Any) -> Engine:
    """An engine in which every step has as many drafts as it can."""
    named = {**SMALL, "max_model_len": LENGTH, **OPTIONS, **options, **more}
    with on_demand(optimized=named.pop("optimized")):
        engine = start_engine(EngineConfig.of(named.pop("model"), named), progress=False)[0]
    engine.scheduler.predictor.costs = Estimates(engine.scheduler.table)
    restart_scheduler(engine, how_many_drafts=all_of_them)
    return engine


def greedy(count: int, most: int = 150, tokens: int = 24, start: tuple[int, ...] = ()) -> list[Work]:
    draw = random.Random(3)
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    prompts = ([draw.randrange(64) for _ in range(draw.randint(1, most))] for _ in range(count))
    return [([*start, *prompt], params) for prompt in prompts]


def accepted(engine: Engine) -> tuple[int, int]:
    speculation = engine.scheduler.speculation
    return sum(speculation.accepted), speculation.tokens


@pytest.mark.parametrize(
    "name", ["mimo", "eagle3", *(pytest.param(n, marks=pytest.mark.full) for n in ("glm4_moe", "qwen3_next"))]
)
def test_a_head_that_knows_the_rule_is_always_right(name: str, models: Any) -> None:
    """It reads the state before a token alone. So it finds the right one in prompts in several chunks, beside
    others, after prefix hits and preemptions, and whatever the number of drafts that were right before.
    """
    options = models(name, follows=True)
    plain, engine = started(options, speculative_config="none"), started(options)
    check_equal(run(engine, greedy(5)), run(plain, greedy(5)))
    right, drafted = accepted(engine)
    assert right == drafted > 40
    shared = greedy(6, most=8, start=(*range(64), *range(64)))
    check_equal(run(engine, shared), run(plain, shared))
    assert engine.scheduler.prefixes.hits == plain.scheduler.prefixes.hits > 64
    right, drafted = accepted(engine)
    assert right == drafted > 80
    limit_pages(engine, 9)
    restart_scheduler(engine, how_many_drafts=all_of_them)
    tight = greedy(4, most=20, tokens=60)
    check_equal(run(engine, tight), run(plain, tight))
    assert engine.scheduler.registry.num_preemptions > 0
    right, drafted = accepted(engine)
    assert right == drafted > 20
    assert engine.compiles_since_start == 0 and engine.scheduler.blocks.owned == 0


@pytest.mark.parametrize(
    "name",
    [
        "mimo",
        "eagle3",
        *(pytest.param(n, marks=pytest.mark.full) for n in ("deepseek_v3", "glm4_moe", "qwen3_next")),
    ],
)
def test_drafts_are_those_recorded(name: str, models: Any) -> None:
    """After a prompt, from states of the model, then from the head's own."""
    options = models(name)
    engine = started(options)
    drafts, learn = list[list[int]](), engine.runner.learn_drafts

    def learned(step: Any) -> None:
        spans = step.plan.drafting
        learn(step)
        drafts.extend(span.following for span in spans)

    engine.runner.learn_drafts = learned  # type: ignore[method-assign]
    with np.load(GOLDEN / f"head_{name}.npz") as file:
        golden = dict(file)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    for i in range(len(golden["lengths"])):
        drafts.clear()
        tokens = golden[f"tokens_{i}"].tolist()
        (answer,) = run(engine, [(tokens[:-1], params)])
        assert answer.tokens[0] == tokens[-1] and drafts[0] == golden[f"drafts_{i}"].tolist()
    assert engine.compiles_since_start == 0


ALL = [pytest.param(n, marks=pytest.mark.full) for n in ("eagle3", "deepseek_v3", "glm4_moe", "qwen3_next")]


@pytest.mark.parametrize("name", ["mimo", *ALL])
def test_a_head_that_is_wrong_changes_nothing(name: str, models: Any) -> None:
    """With random weights it hardly ever is right. Sampled, penalized and scored tokens are as without."""
    options = models(name)
    plain = run(started(options, speculative_config="none"), work(random.Random(5), 12))
    engine = started(options)
    check_equal(run(engine, work(random.Random(5), 12)), plain)
    assert accepted(engine)[1] > 30 and engine.compiles_since_start == 0


@pytest.mark.full
@pytest.mark.parametrize("name", ["mimo", "eagle3"])
@pytest.mark.parametrize(
    "more",
    [
        {"kv_cache_dtype": "int8"},
        {"swap_space": 0.05, "num_pages": 20},
        {"quantization": "int8"},
        {"batch_invariant": True},
    ],
    ids=lambda more: next(iter(more)),
)
def test_with_everything_else(name: str, more: dict[str, Any], models: Any) -> None:
    options = models(name)
    plain = run(started(options, **more, speculative_config="none"), work(random.Random(5), 24))
    engine = started(options, **more)
    check_equal(run(engine, work(random.Random(5), 24)), plain)
    assert accepted(engine)[1] > 30 and engine.compiles_since_start == 0


@pytest.mark.parametrize("name", ["mimo", "eagle3"])
def test_what_a_head_takes(name: str, models: Any) -> None:
    """A layer in each page, and its own weights: the model's embedding and output head are there once."""
    options = {**SMALL, "max_model_len": 96, "dtype": "float32", **models(name)}
    model = options.pop("model")
    _, both = describe_engine(EngineConfig.of(model, options))
    _, plain = describe_engine(EngineConfig.of(model, {**options, "speculative_config": None}))
    layers = plain.model.config.num_layers
    assert both.page_bytes * layers == plain.page_bytes * (layers + 1)
    own = sum(x.size for x in both.weights) - sum(x.size for x in plain.weights)
    hidden, vocab = plain.model.config.hidden_size, plain.model.config.vocab_size
    assert both.draft is not None and own < sum(x.size for x in both.both_leaves[len(both.leaves) :])
    if name == "mimo":
        [found] = [mtp_weights(name, mtp_config(name))]
        assert own == sum(array.size for key, array in found.items() if "mtp_layers" in key)
        assert sum(x.size for x in both.both_leaves) - sum(x.size for x in both.weights) == 2 * hidden * vocab
    assert both.slots.kept is not None and both.slots.kept.states.shape == (9, 5, hidden)
    assert both.fingerprint() != plain.fingerprint()
    without = ModelSource.without_weights(EngineConfig.of(model, options)).draft_config
    assert without is not None and build_draft(without, plain).params == both.draft.params


@pytest.mark.full
def test_a_whole_start(tmp_path: Path, models: Any) -> None:
    """Everything is compiled ahead, and loaded the next time."""
    options = {**SMALL, "max_num_seqs": 4, "max_num_batched_tokens": 68, "max_model_len": 96}
    options |= {"dtype": "float32", "cache_dir": str(tmp_path), **models("mimo", tokens=3)}
    config = EngineConfig.of(options.pop("model"), options)
    engine, started = start_engine(config, progress=False)
    costs = engine.scheduler.predictor.costs
    assert all(costs.known[key].seconds > 0 for key in engine.scheduler.table.draft_keys())
    run(engine, greedy(2, most=20))
    assert engine.compiles_since_start == 0 and started.programs_compiled == started.programs
    spec = describe_engine(config)[1]
    assert engine.memory_parts()["weights"] == device_bytes(spec.weights) < device_bytes(spec.both_leaves)
    engine.close()
    again, loaded = start_engine(config, progress=False)
    assert loaded.programs_compiled == 0
    again.close()


def test_what_is_refused(tmp_path: Path, models: Any) -> None:
    mtp = {"method": "mtp", "num_speculative_tokens": 2}
    head = {**models("eagle3")["speculative_config"]}
    plain, windows = tmp_path / "plain", tmp_path / "windows"
    write_model(plain, EAGLE)
    write_model(windows, "gemma3n_text")
    write_model(tmp_path / "none", "glm4_moe", num_nextn_predict_layers=0)
    write_model(tmp_path / "lost", "glm4_moe", num_nextn_predict_layers=1)
    write_eagle3(tmp_path / "other", EAGLE, vocab_size=97)
    write_eagle3(tmp_path / "wider", EAGLE, target_hidden_size=80)
    write_eagle3(tmp_path / "deeper", EAGLE, eagle_aux_hidden_state_layer_ids=[2, 16, 29])
    write_eagle3(tmp_path / "later", EAGLE, norm_before_fc=True)
    for model, how, says in (
        (plain, mtp, "method='mtp': model_type llama has no such head; deepseek_v3, glm4_moe"),
        (tmp_path / "none", mtp, "method='mtp': the checkpoint has no such head: num_nextn_predict_layers=0"),
        (tmp_path / "lost", mtp, "method='mtp': the checkpoint has no tensors of model.layers.3."),
        (plain, {**head, "model": str(plain)}, "is no EAGLE-3 head but LlamaForCausalLM"),
        (plain, {**head, "model": str(tmp_path / "other")}, "is for 97 tokens in the vocabulary, but the"),
        (plain, {**head, "model": str(tmp_path / "wider")}, "is for hidden states of 80, but the model's"),
        (plain, {**head, "model": str(tmp_path / "deeper")}, "reads layers [2, 16, 29], but the model has 2"),
        (plain, {**head, "model": str(tmp_path / "later")}, "norm_before_fc of EAGLE 3.1 is not supported"),
        (plain, {**mtp, "model": "another"}, "speculative_config.model='another': unknown"),
        (plain, {**head, "model": None}, "must name the head, a folder or a repo id"),
    ):
        with pytest.raises((InvalidArgument, ModelError)) as refused:
            describe_engine(EngineConfig.of(str(model), {**SMALL, "speculative_config": how}))
        assert says in str(refused.value)
    with pytest.raises(ModelError, match="is a head that drafts"):
        describe_engine(EngineConfig.of(head["model"], SMALL))
    assert Speculation.of({**mtp, "method": "deepseek_mtp"}) == Speculation.of(mtp), (
        "vLLM's name for families"
    )
    with pytest.raises(InvalidArgument, match="must be 1 with a draft model or head"):
        EngineConfig.of(str(plain), {"num_scheduler_steps": 8, "speculative_config": mtp})
