"""Converted checkpoints contain the same values as the model's own files, bit for bit."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jengine import LLM, SamplingParams, cli
from jengine.base.errors import InvalidArgument
from jengine.checkpoints import convert, load, orbax, read_config, resolve
from jengine.checkpoints.converted import MARK, PARAMS, stored_config, write_config
from jengine.execution.runner import Runner
from jengine.models import Params, build
from jengine.models.pieces import Piece
from jengine.parallel.mesh import make_mesh
from tests.engine.on_demand import on_demand
from tests.engine.running import SMALL
from tests.golden.weights import VARIANTS, weights, write_model

VARIANT = "llama_attention_bias"
MANY_DEVICES = """
import sys
from pathlib import Path
import jax
from tests.checkpoints.test_orbax import loaded, same

for dtype, devices in (("float32", 2), ("bfloat16", 2), ("float32", 8)):
    ours, theirs = (loaded(Path(folder), dtype, devices) for folder in sys.argv[1:])
    same(ours, theirs)
    qkv = ours["layers"][0]["attention"]["qkv"]
    assert [shard.data.shape[0] for shard in qkv.addressable_shards] == [qkv.shape[0] // devices] * devices
"""


def loaded(folder: Path, dtype: str = "float32", devices: int = 1) -> Params:
    return load(
        folder, build(read_config(folder), dtype, 64, shards=devices), make_mesh(devices), progress=False
    )


def same(ours: Params, theirs: Params) -> None:
    """Checks that both are equal bit for bit, and have the same placement."""

    def compare(a: jax.Array, b: jax.Array) -> None:
        assert (a.shape, a.dtype, a.sharding) == (b.shape, b.dtype, b.sharding)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()

    jax.tree.map(compare, ours, theirs)


def write_tensors(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes model.safetensors including bfloat16, which the numpy part of the package does not support."""
    kinds = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
    header, body = {}, b""
    for name, array in tensors.items():
        header[name] = {
            "dtype": kinds[array.dtype.name],
            "shape": array.shape,
            "data_offsets": [len(body), len(body) + array.nbytes],
        }
        body += array.tobytes()
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + body)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_model(tmp_path / "model", VARIANT)
    return tmp_path / "model"


@pytest.mark.parametrize("variant", ["demo", "llama_tied", "gpt2", "opt_350m", "qwen3_moe_mixed"])
def test_round_trip(variant: str, tmp_path: Path) -> None:
    model = resolve("demo") if variant == "demo" else tmp_path / "model"
    if variant != "demo":
        write_model(model, variant)
    assert convert(str(model), tmp_path / "out", progress=False) == tmp_path / "out"
    assert read_config(tmp_path / "out") == read_config(model)
    for dtype in ("float32", "bfloat16"):
        same(loaded(tmp_path / "out", dtype), loaded(model, dtype))


def test_relative_paths(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    convert("./model", "out", progress=False)
    same(loaded(Path("out")), loaded(model))


@pytest.mark.parametrize("quantization", ["int8", "w8a8", "fp8"])
def test_quantization_on_load(quantization: str, model: Path, tmp_path: Path) -> None:
    out = convert(str(model), tmp_path / "out", progress=False)
    mine, theirs = (
        load(folder, build(read_config(folder), "float32", 64, quantization), make_mesh(1), progress=False)
        for folder in (out, model)
    )
    assert jax.tree.structure(mine) == jax.tree.structure(theirs)
    same(mine, theirs)


def test_round_trip_over_many_devices(model: Path, tmp_path: Path) -> None:
    """With eight devices, kv heads are repeated, and heads and the vocabulary are padded."""
    out = convert(str(model), tmp_path / "out", progress=False)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    subprocess.run([sys.executable, "-c", MANY_DEVICES, str(out), str(model)], check=True, env=environment)


def test_every_dtype_is_kept(model: Path, tmp_path: Path) -> None:
    """The values are random bits, with subnormal numbers, infinities and NaN, so only an exact copy
    passes.
    """
    kinds = [np.dtype(kind) for kind in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)]
    random, tensors = np.random.default_rng(0), {}
    # neighbours that one parameter is made of differ
    for i, (name, array) in enumerate(weights(VARIANT).items()):
        kind = kinds[i % len(kinds)]
        bits = np.frombuffer(random.bytes(array.size * kind.itemsize), kind).reshape(array.shape)
        tensors[name] = np.where(np.isnan(bits), np.zeros((), kind), bits)
    write_tensors(model, tensors)
    out = convert(str(model), tmp_path / "out", progress=False)
    with np.errstate(over="ignore"):
        for dtype in ("float32", "bfloat16", "float16"):
            same(loaded(out, dtype), loaded(model, dtype))


def test_no_dtype_grows(model: Path, tmp_path: Path) -> None:
    from orbax.checkpoint import v1 as ocp

    write_tensors(model, {name: array.astype(ml_dtypes.bfloat16) for name, array in weights(VARIANT).items()})
    out = convert(str(model), tmp_path / "out", progress=False)
    assert {leaf.dtype.name for leaf in ocp.metadata(out / PARAMS).metadata.values()} == {"bfloat16"}


def test_another_dtype_can_be_asked_for(model: Path, tmp_path: Path) -> None:
    out = convert(str(model), tmp_path / "out", dtype="bfloat16", progress=False)
    assert read_config(out).dtype == "bfloat16"
    narrow = loaded(model, "bfloat16")
    same(loaded(out, "bfloat16"), narrow)
    same(loaded(out, "float32"), jax.tree.map(lambda leaf: leaf.astype("float32"), narrow))
    with pytest.raises(InvalidArgument, match="dtype='int8': must be auto, float32, bfloat16, float16"):
        convert(str(model), tmp_path / "other", dtype="int8")  # type: ignore[arg-type]


@pytest.mark.parametrize("batch", [1, 40_000])
def test_batches(model: Path, tmp_path: Path, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orbax, "BATCH", batch)
    same(loaded(convert(str(model), tmp_path / "out", progress=False)), loaded(model))


def test_host_memory_peaks_at_the_largest_parameter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, ffn, layers = 128, 2048, 4
    config = {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
    }
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_attention_heads": 2}))
    pieces = jax.tree.leaves(
        build(read_config(tmp_path), "float32", 64).sources, is_leaf=lambda node: isinstance(node, Piece)
    )
    save_file(
        {piece.name: np.ones(piece.shape, np.float32) for piece in pieces}, tmp_path / "model.safetensors"
    )
    largest = 2 * ffn * hidden * 4  # gate-up, in bytes
    monkeypatch.setattr(orbax, "BATCH", largest // 2)  # down, which comes before it

    def grown(work: Any) -> tuple[int, Any]:
        tracemalloc.start()
        result = work()
        held, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return peak - held, result

    convert(str(tmp_path), tmp_path / "warm", progress=False)  # imports, and what is made once
    beyond, out = grown(lambda: convert(str(tmp_path), tmp_path / "out", progress=False))
    assert beyond < 1.25 * largest
    beyond, params = grown(lambda: loaded(out))
    # or the bounds would say nothing
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(params)) > 6 * largest
    assert beyond < 1.25 * largest


def test_inside_an_event_loop(model: Path, tmp_path: Path) -> None:
    """Saving and loading work in a running event loop, as in a notebook."""

    async def both() -> Params:
        return loaded(convert(str(model), tmp_path / "out", progress=False))

    same(asyncio.run(both()), loaded(model))


def fingerprint(llm: LLM) -> str:
    """Of its programs: those of one are the other's."""
    runner = llm.engine.runner
    assert isinstance(runner, Runner)
    return runner.spec.fingerprint()


def test_the_same_text_as_the_model(text_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(text_model, model)
    (model / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "loud.jinja").write_text("{{ messages[0].content | upper }}")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 5]}))
    out = convert(str(model), tmp_path / "out", progress=False)
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    conversation = [{"role": "user", "content": "The quick"}]
    with on_demand():
        theirs, ours = (LLM(folder, progress=False, max_model_len=192, **SMALL) for folder in (model, out))
    assert fingerprint(ours) == fingerprint(theirs) and ours.engine.model.eos_token_ids == (1, 5)
    for prompt in ("def fibonacci(n):", "The end of"):
        one, two = (llm.generate(prompt, greedy, use_tqdm=False)[0] for llm in (theirs, ours))
        assert (one.prompt_token_ids, one.outputs) == (two.prompt_token_ids, two.outputs)
    one, two = (llm.chat(conversation, greedy, use_tqdm=False)[0] for llm in (theirs, ours))
    assert (one.prompt, one.outputs) == (two.prompt, two.outputs)
    assert ours.tokenizer.chat_templates.keys() == {"default", "loud"}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_configuration_is_kept(variant: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(VARIANTS[variant]))
    config = read_config(tmp_path)
    write_config(tmp_path, config)
    assert stored_config(json.loads((tmp_path / MARK).read_text())) == config
    assert read_config(tmp_path) == config


def test_command(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    out, quiet = tmp_path / "out", tmp_path / "quiet"
    assert cli.main(["convert", str(model), str(out), "--dtype", "float16"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "" and "%" not in shown.err and f"jengine generate {out} PROMPT" in shown.err
    assert read_config(out).dtype == "float16"
    assert cli.main(["convert", str(model), str(quiet), "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    assert cli.main(["convert", str(model), str(out)]) == 2
    assert capsys.readouterr().err == f"jengine: error: out={str(out)!r}: must be a new or an empty folder\n"
