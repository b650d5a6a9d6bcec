"""Heads that draft, compared with recorded results: their arithmetic, their tensors' names, and which of the
model's states they read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.checkpoints import eagle3_config, load, mtp_config, read_config
from jengine.models import DRAFT_HEADS, Model, Params, build
from jengine.models.draft_heads import Eagle3Head, of_model
from jengine.parallel.mesh import make_mesh
from pallas_kernels.quantization.quantized import Quantized
from tests.checkpoints.quantized_models import LINEAR, int8, write_safetensors
from tests.checkpoints.test_quantized_formats import compressed
from tests.golden.heads import MTP, mtp_weights, write_eagle3, write_folder, write_mtp
from tests.golden.heads import mtp_config as mtp_config_of
from tests.golden.weights import write_model
from tests.models.dense import DenseCausal

GOLDEN = Path(__file__).parent.parent / "golden"
LONGEST, PADDED, TOLERANCE = 192, 71, 5e-4
EAGLE = "llama_gqa"  # the model of the EAGLE-3 heads


def declared(name: str, folder: Path) -> tuple[Model, Model, Params, Params]:
    """A model and its head, with their parameters."""
    if name.startswith("eagle3"):
        write_model(folder, EAGLE)
        write_eagle3(folder / "head", EAGLE, speculators=name.endswith("speculators"))
        config, place = read_config(folder), folder / "head"
        own = of_model(eagle3_config(place), config.num_layers, own_embedding=name.endswith("speculators"))
    else:
        write_mtp(folder, name)
        config, place = read_config(folder), folder
        own = mtp_config(folder, config)
    model = build(config, "float32", LONGEST)
    head = build(own, "float32", LONGEST).sharing(model)
    params = load(folder, model, make_mesh(1), progress=False)
    shared = {part: params[part] for part in head.shared if part in params}
    return model, head, params, {**load(place, head.alone, make_mesh(1), progress=False), **shared}


FURTHER = ("glm4_moe_lite", "glm4_moe", "qwen3_5_text", "eagle3_speculators")  # of classes that others have
CASES = [
    pytest.param(name, marks=[pytest.mark.full] if name in FURTHER else [])
    for name in (*MTP, "eagle3", "eagle3_speculators")
]


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_recorded(name: str, tmp_path: Path) -> None:
    model, head, params, of_head = declared(name, tmp_path)

    def run(params: Params, of_head: Params, tokens: jax.Array) -> jax.Array:
        positions = jnp.arange(len(tokens))
        attention = DenseCausal(jnp.zeros(len(tokens)), positions)
        module: Any = model.bind(params)
        if head.reads:
            states = module.hidden_and_states(tokens, positions, attention, head.reads)[1]
        else:
            states = [module.hidden(tokens, positions, attention)]
        bound: Any = head.bind(of_head)
        before = jnp.pad(bound.entering(states), ((1, 0), (0, 0)))[:-1]
        attention = DenseCausal(jnp.zeros(len(tokens)), positions)
        return bound.logits(bound.ahead(tokens, positions, attention, before)[0])

    compiled = jax.jit(run)
    with np.load(GOLDEN / f"head_{name}.npz") as file:
        golden = dict(file)
    assert golden["smallest_margin"] > 1e-3
    for i in range(len(golden["lengths"])):
        tokens, expected = golden[f"tokens_{i}"], golden[f"logits_{i}"]
        padded = np.pad(tokens, (0, PADDED - len(tokens)))  # one program for all lengths
        found = np.asarray(compiled(params, of_head, padded))[1 : len(tokens), : head.config.vocab_size]
        columns = found.shape[1]
        if "offsets" in of_head:
            expected = expected[:, np.arange(columns) + np.asarray(of_head["offsets"])]
        assert np.abs(found - expected).max() < TOLERANCE
        ids = head.head(of_head)
        assert ids is not None and np.asarray(ids.ids(found.argmax(1)))[-1] == golden[f"drafts_{i}"][0]


def test_a_quantized_checkpoints_head_is_quantized_as_its_model(tmp_path: Path) -> None:
    """Its matrices stay in the checkpoint's eight bits; the product of both inputs is not quantized."""
    config, tensors = mtp_config_of("mimo"), dict[str, np.ndarray]()
    wide = mtp_weights("mimo", config)
    for name, array in mtp_weights("mimo", config).items():
        if name.endswith(LINEAR):
            parts, wide[name] = int8(array)
            tensors |= {f"{name.removesuffix('weight')}{part}": value for part, value in parts.items()}
        else:
            tensors[name] = array
    write_folder(tmp_path / "wide", config, wide)
    write_folder(tmp_path / "narrow", {**config, "quantization_config": compressed("int-quantized")}, {})
    write_safetensors(tmp_path / "narrow" / "model.safetensors", tensors)
    found = []
    for folder in (tmp_path / "wide", tmp_path / "narrow"):
        model = build(read_config(folder), "float32", LONGEST)
        head = build(mtp_config(folder, model.config), "float32", LONGEST).sharing(model)
        params = load(folder, model, make_mesh(1), progress=False)
        of_head = {**load(folder, head.alone, make_mesh(1), progress=False), "embed": params["embed"]}
        of_head["lm_head"] = params["lm_head"]
        tokens = jnp.arange(9)
        bound: Any = head.bind(of_head)
        attention = DenseCausal(jnp.zeros(9), tokens)
        hidden = bound.ahead(tokens, tokens, attention, jnp.ones((9, 64)))[0]
        found.append((np.asarray(bound.logits(hidden)), of_head))
    (expected, _), (logits, of_head) = found
    layer = of_head["layers"][0]
    kept = layer["attention"]["qkv"], layer["mlp"]["down"]
    assert all(isinstance(weight, Quantized) and weight.values.dtype == np.int8 for weight in kept)
    assert np.abs(logits - expected).max() < TOLERANCE


def test_every_kind_of_head_is_compared() -> None:
    compared = {f"{name}_mtp" for name in MTP} | {"eagle3"}
    others = {"kimi_k2_mtp", "qwen3_5_mtp", "qwen3_5_moe_mtp", "qwen3_5_moe_text_mtp"}
    assert {*DRAFT_HEADS} - compared == others, "of classes that are compared"


def test_layers_of_an_eagle3_head(tmp_path: Path) -> None:
    """Ids of vLLM and speculators name the layers that read a state, those of SGLang those that leave it."""

    def before(**changes: Any) -> tuple[int, ...]:
        write_eagle3(tmp_path, EAGLE, **{"eagle_aux_hidden_state_layer_ids": None, **changes})
        return of_model(eagle3_config(tmp_path), 32, own_embedding=False).part(Eagle3Head).before

    assert before() == (2, 16, 29)
    assert before(eagle_aux_hidden_state_layer_ids=[1, 5, 32]) == (1, 5, 32)
    assert before(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}) == (2, 16, 29)
