"""Engines on a caller's mesh, and with weights from memory."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from safetensors.numpy import load_file, save_file

from jengine import LLM, AsyncLLM, EngineConfig, InvalidArgument, ModelError, SamplingParams
from jengine.checkpoints import load, read_config
from jengine.checkpoints.in_memory import in_memory
from jengine.engine.operations import ResetPrefixCache
from jengine.models import build
from jengine.parallel.mesh import make_mesh
from jengine.spi import start_engine
from tests.checkpoints.quantized_models import gptq, write_quantized
from tests.engine.on_demand import on_demand
from tests.engine.running import SMALL, run
from tests.golden.weights import VARIANTS, weights, write_model
from tests.text.conftest import byte_level, write

OPTIONS: dict[str, Any] = {**SMALL, "max_model_len": 64}
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
WORK = [([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=8, logprobs=3, ignore_eos=True))]
EVERY_LAYOUT = ["llama_gqa", "gpt2", "falcon_40b", "gptj", "qwen3_moe", "qwen3_5_moe_text"]


def on_device(tensors: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    return {name: jnp.asarray(array) for name, array in tensors.items()}


def without_weights(folder: Path, variant: str, **changes: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**VARIANTS[variant], **changes}))
    return folder


@pytest.mark.parametrize("variant", EVERY_LAYOUT)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parameters_equal_those_of_the_folder(tmp_path: Path, variant: str, dtype: str) -> None:
    """Fused, transposed, interleaved and stacked tensors; from the host and from the device."""
    write_model(tmp_path, variant)
    model = build(read_config(tmp_path), dtype, 64)
    expected = load(tmp_path, model, make_mesh(1), progress=False)
    tensors = weights(variant)
    for given in (
        tensors,
        on_device(tensors),
        {**tensors, **on_device({name: tensors[name] for name in [*tensors][::2]})},
    ):
        found = load(tmp_path, model, make_mesh(1), False, in_memory(given))
        assert jax.tree.map(lambda x: (x.dtype, x.sharding), found) == jax.tree.map(
            lambda x: (x.dtype, x.sharding), expected
        )
        jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_weights_in_memory_are_quantized(tmp_path: Path, quantization: str) -> None:
    write_model(tmp_path, "llama_gqa")
    model = build(read_config(tmp_path), "float32", 64, quantization)
    expected = load(tmp_path, model, make_mesh(1), progress=False)
    for given in (weights("llama_gqa"), on_device(weights("llama_gqa"))):
        jax.tree.map(
            np.testing.assert_array_equal,
            load(tmp_path, model, make_mesh(1), False, in_memory(given)),
            expected,
        )


@pytest.mark.parametrize("kind", ["int8", "uint8", "int32"])
def test_integers_are_no_weights(tmp_path: Path, kind: str) -> None:
    folder = without_weights(tmp_path / "model", "llama_gqa")
    params = weights("llama_gqa") | {Q_PROJ: weights("llama_gqa")[Q_PROJ].astype(kind)}
    with pytest.raises(ModelError, match=f"params: tensor {Q_PROJ}: dtype .* is not supported; .*"):
        load(folder, build(read_config(folder), "float32", 64), make_mesh(1), False, in_memory(params))


@pytest.mark.parametrize("numbers", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_an_engine_answers_as_with_the_folder(tmp_path: Path, numbers: Any, kind: str) -> None:
    tensors = {name: array.astype(kind).astype("float32") for name, array in weights("llama_gqa").items()}
    write_model(tmp_path / "whole", "llama_gqa")
    save_file(tensors, tmp_path / "whole" / "model.safetensors")
    folder = without_weights(tmp_path / "bare", "llama_gqa")
    params = {
        name: numbers(array.astype(ml_dtypes.bfloat16 if kind == "bfloat16" else kind))
        for name, array in tensors.items()
    }
    with on_demand():
        expected, _ = start_engine(EngineConfig.of(str(tmp_path / "whole"), OPTIONS), progress=False)
        engine, started = start_engine(EngineConfig.of(str(folder), OPTIONS), params=params, progress=False)
    assert started.folder == folder and started.seconds.keys() >= {
        "configuration",
        "weights",
        "programs",
        "warm-up",
    }
    [one], [other] = run(engine, WORK), run(expected, WORK)
    assert one.tokens == other.tokens
    assert [update.logprobs for update in one.updates] == [update.logprobs for update in other.updates]


def test_the_caller_may_delete_the_arrays(tmp_path: Path) -> None:
    """As a training step does that takes them over. And the engine holds none of them."""
    folder = without_weights(tmp_path / "model", "llama_gqa")
    params = on_device(weights("llama_gqa"))
    with on_demand():
        engine, _ = start_engine(EngineConfig.of(str(folder), OPTIONS), params=params, progress=False)
    [before] = run(engine, WORK)
    left = weakref.ref(params.pop(Q_PROJ))
    gc.collect()
    assert left() is None
    for array in params.values():
        array.delete()
    engine.do(ResetPrefixCache())
    assert run(engine, WORK)[0].tokens == before.tokens


def test_an_array_that_was_deleted_is_named() -> None:
    array = jnp.ones(3)
    array.delete()
    with pytest.raises(ModelError, match="params: tensor weight: was deleted"):
        in_memory({"weight": array})


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    folder, tensors = without_weights(tmp_path / "model", "llama_gqa"), weights("llama_gqa")

    def start(params: Any) -> None:
        start_engine(EngineConfig.of(str(folder), OPTIONS), params=params, progress=False)

    with pytest.raises(ModelError, match=f"^params: tensor {Q_PROJ}: is missing"):
        start({name: array for name, array in tensors.items() if name != Q_PROJ})
    with pytest.raises(ModelError, match=r"^params: tensor lora\.weight: is not part of this model"):
        start({**tensors, "lora.weight": np.ones(2, np.float32)})
    with pytest.raises(
        ModelError, match=rf"^params: tensor {Q_PROJ}: has shape \[3\]; the configuration needs \["
    ):
        start({**tensors, Q_PROJ: np.ones(3, np.float32)})
    with pytest.raises(
        ModelError, match=f"^params: tensor {Q_PROJ}: dtype complex64 is not supported; float64, float32"
    ):
        start({**tensors, Q_PROJ: tensors[Q_PROJ].astype(np.complex64)})
    with pytest.raises(
        InvalidArgument, match=r"^params='layers: dict': must map names of a checkpoint's tensors"
    ):
        start({"layers": {}})
    with pytest.raises(InvalidArgument, match=r"^params='list': must map names"):
        start([])


def test_constants_of_older_checkpoints_are_skipped(tmp_path: Path) -> None:
    folder = without_weights(tmp_path / "model", "llama_tied")
    tensors = weights("llama_tied") | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    assert load(folder, build(read_config(folder), "float32", 64), make_mesh(1), False, in_memory(tensors))


def test_tensors_of_a_quantized_checkpoint(tmp_path: Path) -> None:
    write_quantized(
        tmp_path,
        {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True},
        gptq(64, 4, symmetric=True),
    )
    model = build(read_config(tmp_path), "float32", 64)
    expected = load(tmp_path, model, make_mesh(1), progress=False)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    for given in (tensors, on_device(tensors)):
        jax.tree.map(
            np.testing.assert_array_equal,
            load(tmp_path, model, make_mesh(1), False, in_memory(given)),
            expected,
        )


def test_a_model_without_an_output_head_embeds(tmp_path: Path) -> None:
    folder, tensors = without_weights(tmp_path / "model", "llama_gqa"), weights("llama_gqa")
    del tensors["lm_head.weight"]
    with on_demand():
        engine, started = start_engine(
            EngineConfig.of(str(folder), {**OPTIONS, "embeddings": True}), params=tensors, progress=False
        )
    assert started.embedder is not None and not started.embedder.generates
    engine.close()


def test_llms_with_a_mesh_and_weights(tmp_path: Path) -> None:
    tokenizer = byte_level()
    folder = write(
        tokenizer, without_weights(tmp_path / "model", "llama_tied", vocab_size=tokenizer.get_vocab_size())
    )
    tensors = weights("llama_tied", {**VARIANTS["llama_tied"], "vocab_size": tokenizer.get_vocab_size()})
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with on_demand(), LLM(folder, mesh=mesh, params=tensors, progress=False, **OPTIONS) as llm:
        expected = llm.generate("def", WORK[0][1], use_tqdm=False)[0].outputs[0]
        assert dict(llm.engine.runner.spec.mesh.shape) == {"tensor": 1}

    async def answer() -> list[int]:
        async with AsyncLLM(folder, mesh=mesh, params=on_device(tensors), progress=False, **OPTIONS) as llm:
            async for output in llm.generate("def", WORK[0][1], output_kind="final"):
                tokens = output.outputs[0].token_ids
        return tokens

    with on_demand():
        assert asyncio.run(answer()) == expected.token_ids


def test_a_mesh_that_does_not_fit_is_refused() -> None:
    device = jax.devices()[0]

    def refused(mesh: Any, match: str, **options: Any) -> None:
        with pytest.raises(InvalidArgument, match=match):
            LLM("demo", mesh=mesh, progress=False, **options)

    many = np.array([[device] * 2] * 2, object)
    refused([device], "^mesh=.*: must be a jax.sharding.Mesh")
    refused(
        Mesh(many, ("data", "model")),
        "^mesh='data=2, model=2': must have at most one axis with more than one device",
    )
    refused(Mesh(many[0], ("data",)), "^mesh='data=2': must not have a device twice")
    refused(
        Mesh([device], ("model",)),
        "^tensor_parallel_size=2: must be 1, the devices of mesh",
        tensor_parallel_size=2,
    )


def test_an_engine_in_another_process_takes_neither() -> None:
    for name, value in (("mesh", Mesh([jax.devices()[0]], ("x",))), ("params", {"weight": np.ones(3)})):
        with pytest.raises(
            InvalidArgument, match=f"^{name}='{type(value).__name__}': is no option of an engine's process"
        ):
            EngineConfig.of("demo", {name: value})
        shared = EngineConfig.of("demo", {"num_processes": 2, "coordinator": "127.0.0.1:1"})
        with pytest.raises(
            InvalidArgument, match=f"^{name}='{type(value).__name__}': must be None with num_processes=2"
        ):
            start_engine(shared, **{name: value})  # type: ignore[arg-type]


def test_names_of_other_layouts_are_refused(tmp_path: Path) -> None:
    (tmp_path / "jengine.json").write_text("{}")
    with pytest.raises(
        InvalidArgument, match=r"^params='1 tensor': must be None with a GGUF file or a converted folder"
    ):
        start_engine(
            EngineConfig.of(str(tmp_path), OPTIONS), params={"weight": np.ones(3, np.float32)}, progress=False
        )
