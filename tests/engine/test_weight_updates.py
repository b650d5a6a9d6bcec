"""Weights that are replaced while an engine runs."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from jengine import LLM, AsyncLLM, EngineConfig, InvalidArgument, ModelError, SamplingParams
from jengine.base.compiles import compile_count
from jengine.checkpoints.in_memory import assemble_on_devices
from jengine.core.weights import Version, next_version
from jengine.engine.loop.engine import Engine
from jengine.engine.operations import (
    GetPauseState,
    LoadWeights,
    Sleep,
    UpdateWeights,
    WakeUp,
    decode_operation,
)
from jengine.spi import start_engine
from tests.checkpoints.quantized_models import gptq, write_quantized
from tests.engine.on_demand import on_demand
from tests.engine.running import SMALL, Answer, run
from tests.golden.weights import weights, write_model

# bits do not depend on the steps, which costs that were measured shape
EXACT = {"batch_invariant": True, "tile_size": 16}
OPTIONS: dict[str, Any] = {**SMALL, "max_model_len": 96, "weight_updates": True, **EXACT}
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
QUANTIZED = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True}
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, logprobs=2, ignore_eos=True)
WORK = [([5, 6, 7, *range(9, 40)], PARAMS), ([8] * 20, PARAMS)]


def tensors(number: int, variant: str = "llama_gqa") -> dict[str, np.ndarray]:
    """The variant's weights, and others."""
    rng = np.random.default_rng(number)
    return {
        name: array + np.float32(number and 0.3 * array.std()) * rng.standard_normal(array.shape, np.float32)
        for name, array in sorted(weights(variant).items())
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, "llama_gqa")
    return folder


def started(folder: Path, params: Any = None, **options: Any) -> Engine:
    with on_demand(optimized=True):
        config = EngineConfig.of(str(folder), {**OPTIONS, **options})
        return start_engine(config, params=params, progress=False)[0]


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return started(folder)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[Any]]:
    """Answers of fresh engines, by the number of the weights."""
    return [said(run(started(folder, tensors(number), weight_updates=False), WORK)) for number in range(3)]


def said(answers: list[Answer]) -> list[Any]:
    return [[(update.token, update.logprobs) for update in answer.updates] for answer in answers]


def versions(answers: list[Answer]) -> set[Version]:
    return {update.version for answer in answers for update in answer.updates}


def parameters(engine: Engine) -> list[jax.Array]:
    return [*engine.runner.worker.state.leaves]  # type: ignore[attr-defined]


def test_answers_equal_those_of_a_fresh_engine(engine: Engine, expected: list[list[Any]]) -> None:
    """Bits too, from the host and from the device; nothing is compiled. And back again: no page is found that
    other weights computed.
    """
    run(engine, WORK)
    counted = compile_count()
    for number, kind in ((1, np.asarray), (2, jax.device_put), (0, jax.device_put), (1, np.asarray)):
        version = engine.do(UpdateWeights({name: kind(array) for name, array in tensors(number).items()}))
        answers = run(engine, WORK)
        assert said(answers) == expected[number]
        assert versions(answers) == {version}
        assert compile_count() == counted


@pytest.mark.filterwarnings("ignore:.*is emulated")
@pytest.mark.parametrize("quantization", ["int8", "w8a8", "fp8", "int4", "int4_mixed", "w4a8"])
def test_quantized_weights_are_quantized_as_at_the_start(folder: Path, quantization: str) -> None:
    how: dict[str, Any] = {"quantization": quantization}
    engine, other = started(folder, **how), started(folder, tensors(1), **how)
    counted = compile_count()
    engine.do(UpdateWeights({name: jax.device_put(array) for name, array in tensors(1).items()}))
    assert compile_count() == counted
    jax.tree.map(np.testing.assert_array_equal, parameters(engine), parameters(other))


def test_fused_and_tied_parameters(tmp_path: Path) -> None:
    for variant in ("gpt2", "falcon_40b", "qwen3_moe", "llama_tied"):
        write_model(tmp_path / variant, variant)
        engine = started(tmp_path / variant, max_model_len=64)
        other = started(tmp_path / variant, tensors(1, variant), max_model_len=64)
        engine.do(UpdateWeights(iter(tensors(1, variant).items())))
        jax.tree.map(np.testing.assert_array_equal, parameters(engine), parameters(other))


def test_bfloat16_takes_float32_too(folder: Path) -> None:
    engine, other = started(folder, dtype="bfloat16"), started(folder, tensors(1), dtype="bfloat16")
    counted = compile_count()
    engine.do(UpdateWeights({name: jax.device_put(array) for name, array in tensors(1).items()}))
    jax.tree.map(np.testing.assert_array_equal, parameters(engine), parameters(other))
    narrow = {name: array.astype(jnp.bfloat16) for name, array in tensors(1).items()}
    engine.do(UpdateWeights({name: jax.device_put(array) for name, array in narrow.items()}))
    assert compile_count() == counted
    jax.tree.map(np.testing.assert_array_equal, parameters(engine), parameters(other))
    with pytest.raises(ModelError, match=f"{Q_PROJ}: has dtype float16; updates take bfloat16 and float32"):
        engine.do(UpdateWeights({**narrow, Q_PROJ: narrow[Q_PROJ].astype(np.float16)}))


def test_constants_are_left_out_as_at_the_start(folder: Path, tmp_path: Path) -> None:
    """Older checkpoints have masks and positions, in dtypes that no weight has."""
    mask = {"model.layers.0.attn.bias": np.ones((1, 1, 4, 4), bool)}
    save_file({**tensors(0), **mask}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    engine = started(tmp_path)
    save_file({**tensors(1), **mask}, tmp_path / "model.safetensors")
    assert engine.do(LoadWeights(str(tmp_path))) == 1
    assert engine.do(UpdateWeights({**tensors(2), **mask})) == 2
    assert said(run(started(folder, {**tensors(2), **mask}), WORK)) == said(run(engine, WORK))


def test_a_tree_of_parameters_is_used_without_a_copy(folder: Path, expected: list[list[Any]]) -> None:
    """At the start and in updates; nested, as a module's state, or by name. Nothing is compiled."""
    source = started(folder, tensors(1))
    shape = jax.tree.structure(source.weights.params)
    tree = jax.tree.unflatten(shape, parameters(source))
    engine = started(folder, tree)
    assert all(one is other for one, other in zip(parameters(engine), parameters(source), strict=True))
    assert said(run(engine, WORK)) == expected[1]
    changed = jax.tree.unflatten(shape, parameters(started(folder, tensors(2))))
    counted = compile_count()
    for given in (changed, nnx.State(changed)):
        engine.do(UpdateWeights(tree))
        engine.do(UpdateWeights(given))
        assert parameters(engine)[3] is jax.tree.leaves(changed)[3]
        assert said(run(engine, WORK)) == expected[2]
    engine.do(UpdateWeights(jax.tree.map(np.asarray, tree)))
    assert said(run(engine, WORK)) == expected[1]
    assert compile_count() == counted
    wrong = {**tree, "embed": tree["embed"].astype(jnp.bfloat16)}
    with pytest.raises(ModelError, match="tensor embed: has dtype bfloat16; the model needs float32"):
        engine.do(UpdateWeights(wrong))


def test_old_and_new_weights_never_live_twice(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = started(folder)
    given = {name: jax.device_put(array) for name, array in tensors(1).items()}
    gc.collect()
    before, most = held(), 0

    def noting(target: Any, source: Any, arrays: Any, assemble: Any = assemble_on_devices) -> jax.Array:
        nonlocal most
        made: jax.Array = assemble(target, source, arrays)
        most = max(most, held())
        return made

    monkeypatch.setattr("jengine.checkpoints.weights.assemble_on_devices", noting)
    old = [weakref.ref(leaf) for leaf in parameters(engine)]
    engine.do(UpdateWeights(given))
    assert most and not any(leaf() is not None for leaf in old)
    largest = max(leaf.nbytes for leaf in parameters(engine))
    assert held() == before and most <= before + largest


def held() -> int:
    """Bytes of all arrays of this process."""
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.mark.parametrize("kind", [np.asarray, jax.device_put])
def test_wrong_weights_change_nothing(engine: Engine, kind: Any) -> None:
    good = {name: kind(array) for name, array in tensors(2).items()}
    version, before = engine.weights_version, parameters(engine)
    nan = tensors(2)[Q_PROJ].copy()
    nan[3, 5] = np.nan

    def refused(given: Any, message: str, error: type[Exception] = ModelError, **how: Any) -> None:
        with pytest.raises(error, match=message):
            engine.do(UpdateWeights(given, **how))
        assert engine.weights_version == version
        assert all(one is other for one, other in zip(parameters(engine), before, strict=True))

    refused({name: good[name] for name in good if name != Q_PROJ}, f"tensor {Q_PROJ}: is missing")
    refused({**good, "lora.weight": good[Q_PROJ]}, r"tensor lora\.weight: is not part of this model")
    refused({**good, Q_PROJ: good[Q_PROJ][:-1]}, rf"tensor {Q_PROJ}: has shape \[\d+, 64\]; the conf")
    refused({**good, Q_PROJ: good[Q_PROJ].astype(np.float16)}, f"tensor {Q_PROJ}: has dtype float16; updates")
    refused({**good, Q_PROJ: kind(nan)}, f"tensor {Q_PROJ}: has a number that is not", check_finite=True)
    refused([*good.items(), (Q_PROJ, good[Q_PROJ])].__iter__(), f"tensor {Q_PROJ}: is given twice")
    refused({**good, Q_PROJ: 3.0}, f"params='{Q_PROJ}: float': must map", InvalidArgument)
    refused(iter([3]), "an iterator must give pairs", InvalidArgument)
    refused(good, "version=True: must be a whole number or text", InvalidArgument, version=True)
    engine.do(UpdateWeights(good, check_finite=True))


def test_numbers_are_checked_in_the_dtype_of_the_model(folder: Path) -> None:
    """1e5 is finite in the file, and infinite on the device."""
    large = tensors(1)
    large[Q_PROJ] = np.full_like(large[Q_PROJ], 1e5)
    message = f"tensor {Q_PROJ}: has a number that is not finite in float16"
    engine = started(folder, dtype="float16", batch_invariant=False)
    with pytest.raises(ModelError, match=message):
        engine.do(UpdateWeights(large, check_finite=True))


def test_engines_that_take_no_updates(folder: Path, tmp_path: Path) -> None:
    fixed = started(folder, weight_updates=False)
    with pytest.raises(InvalidArgument, match="weight_updates=False: must be True at the start"):
        fixed.do(UpdateWeights(tensors(1)))
    with pytest.raises(InvalidArgument, match="level=2: must be 1 without weight_updates"):
        fixed.do(Sleep(2))
    assert fixed.do(Sleep(2, tags=("kv_cache",))) and fixed.do(Sleep(1)) and fixed.do(Sleep(2))
    fixed.do(WakeUp(("weights",)))
    fixed.do(WakeUp())
    assert not fixed.do(GetPauseState()).paused
    with pytest.raises(InvalidArgument, match="operation='UpdateWeights': must be one of"):
        decode_operation("UpdateWeights", b"{}")
    write_quantized(tmp_path, QUANTIZED, gptq(64, 4, symmetric=True))
    with pytest.raises(InvalidArgument, match=r"^weight_updates=True: the checkpoint stores weights as"):
        started(tmp_path)


def test_versions() -> None:
    assert next_version(None, 3) == 4 and next_version("best", 3) == "best" and next_version(7, "best") == 7
    for wrong, current in ((None, "best"), (True, 0), ("", 0), ("x" * 257, 0), (2**63, 0), (1.5, 0)):
        with pytest.raises(InvalidArgument, match=r"^version="):
            next_version(wrong, current)  # type: ignore[arg-type]


@pytest.mark.parametrize("keep_cache", [False, True])
def test_running_requests_go_on_with_the_new_weights(folder: Path, keep_cache: bool) -> None:
    """What follows is what a fresh engine generates after the tokens so far; with keep_cache, from the keys
    and values of the old weights.
    """
    engine, updated = started(folder, speculative_config="none"), list[int]()

    def update() -> None:
        by_id = engine.scheduler.registry.by_id.values()
        if not updated and by_id and all(len(s.tokens) >= s.prompt_len + 3 for s in by_id):
            updated.append(1)
            engine.do(UpdateWeights(tensors(1), keep_cache=keep_cache))

    answers = run(engine, WORK, update)
    preempted = sum(answer.sequence.num_preemptions for answer in answers)
    assert versions(answers) == {0, 1} and preempted == (0 if keep_cache else 2)
    assert engine.load.preemptions == 0, "there were pages"
    new = started(folder, tensors(1))
    for (prompt, params), answer in zip(WORK, answers, strict=True):
        made = [update.version for update in answer.updates]
        assert made == sorted(made)
        first = made.index(1)
        [fresh] = run(new, [(prompt + answer.tokens[:first], params.clone(max_tokens=12 - first))])
        assert (said([answer])[0][first:] == said([fresh])[0]) is not keep_cache
    # pages of both versions are not found, those of the new one are
    assert run(engine, WORK)[0].sequence.num_cached == (0 if keep_cache else 32)


@pytest.fixture
def llm(text_model: Path) -> Iterator[LLM]:
    with (
        on_demand(),
        LLM(text_model, progress=False, **{**OPTIONS, "max_model_len": 192, "num_pages": 80}) as llm,
    ):
        yield llm


def test_outputs_say_which_weights_made_them(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    tree = jax.tree.map(
        lambda leaf: jax.random.normal(jax.random.key(0), leaf.shape, leaf.dtype) * 0.02, llm.abstract_params
    )
    versions = [(0, 0)]
    outputs = llm.stream("dog", params)
    for number, output in enumerate(outputs):
        completion = output.outputs[0]
        if number == 2:
            versions.append((len(completion.token_ids) + 1, 1))  # a step was in flight
            assert llm.update_weights(tree) == llm.weights_version == 1
    assert completion.weights_versions == versions and completion.weights_version == 1
    assert llm.update_weights(tree, "best") == "best"
    [output] = llm.generate("dog", params, use_tqdm=False)
    assert output.outputs[0].weights_versions == [(0, "best")]


def test_an_async_engine_takes_updates(text_model: Path) -> None:
    async def main() -> None:
        options = {**OPTIONS, "max_model_len": 192, "num_pages": 80}
        async with AsyncLLM(text_model, progress=False, **options) as llm:
            spec = llm.backend.engine.weights.params  # type: ignore[attr-defined]
            tree = jax.tree.map(lambda leaf: np.full(leaf.shape, 0.01, leaf.dtype), spec)
            assert await llm.update_weights(tree, "ones") == "ones"
            with pytest.raises(ModelError, match="tensor embed: is missing"):
                await llm.update_weights({name: tree[name] for name in tree if name != "embed"}, 2)
            outputs = [output async for output in llm.generate("dog", SamplingParams(max_tokens=3))]
            assert outputs[-1].outputs[0].weights_version == "ones"

    with on_demand():
        asyncio.run(main())
