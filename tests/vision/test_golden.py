"""Images, their encoders, and whole models with images, compared with transformers."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jengine.base.errors import ModelError
from jengine.checkpoints import load, read_config
from jengine.checkpoints.encoder import WRAPPED, encoder_makers
from jengine.checkpoints.in_memory import in_memory
from jengine.checkpoints.stored import Tensor
from jengine.checkpoints.weights import assemble
from jengine.core.config import EngineConfig
from jengine.engine.setup.model_source import ModelSource
from jengine.models import build
from jengine.models.recurrent import LinearAttention
from jengine.models.whole_sequences import WholeSequences
from jengine.parallel.mesh import make_mesh
from jengine.scheduling.requests.images import mrope
from jengine.vision.declared import Encoder
from jengine.vision.family import VISUAL, Patches, Vision
from jengine.vision.folder import vision_of
from tests.golden.images import last_seen
from tests.golden.pictures import PICTURES, pictures, text
from tests.golden.weights import VARIANTS, weights, write_model
from tests.models.dense import DenseCausal


class Visual(NamedTuple):
    """See WholeSequences."""

    here: jax.Array
    rows: jax.Array


TOLERANCE = 1e-4
ENDS, BOTH_WAYS = ("start", "end"), ("gemma3", "gemma4")
SEVERAL = ("qwen3_vl",)  # recorded images need more than one block of queries
FURTHER = ("qwen3_vl_moe", "qwen3_5_moe")  # whose encoder is another's
CASES = [
    pytest.param(variant, marks=[pytest.mark.full] if variant in FURTHER else []) for variant in PICTURES
]


@cache
def recorded(variant: str) -> dict[str, np.ndarray]:
    with np.load(Path(__file__).parent.parent / "golden" / f"images_{variant}.npz") as file:
        return dict(file)


def made(variant: str, folder: Path) -> Vision:
    (folder / "config.json").write_text(json.dumps(VARIANTS[variant]))
    (folder / "preprocessor_config.json").write_text(json.dumps(PICTURES[variant].processor))
    found = vision_of(folder, lambda text: [0])
    assert found is not None
    return found


def bound(found: Vision, variant: str) -> Any:
    """The encoder with its parameters."""
    graph, state = nnx.split(found.module("float32"))
    tensors = {
        name.removeprefix("model.").replace(*WRAPPED): Tensor(Path(), array)
        for name, array in weights(variant).items()
    }

    def parameter(_: Any, declared: Any) -> Any:
        target = declared.get_value()
        return jnp.asarray(assemble(target, declared.get_metadata("source"), tensors))

    return nnx.merge(graph, nnx.to_pure_dict(nnx.map_state(parameter, state)))


def encoded(found: Vision, module: Any, images: list[Patches], size: int, gap: int = 0) -> list[np.ndarray]:
    """Each image's rows, in a bucket of `size` patches, with `gap` times the smallest part of padding before
    each. Padding is not zero.
    """
    each = found.patches_per_row
    pixels = np.full((size, found.features), 7.0, np.float32)
    places, segments = np.zeros((size, found.places), np.int32), np.zeros(size, np.int32)
    end, where = 0, []
    for number, image in enumerate(images, 1):
        start = end + gap * found.smallest
        end = start + len(image.pixels)
        pixels[start:end], places[start:end], segments[start:end] = image.pixels, image.places, number
        where.append(slice(start // each, start // each + image.rows))
    run = jax.jit(found.encode)
    rows = np.asarray(run(module, pixels, places, segments))
    return [rows[at] for at in where]


@pytest.mark.parametrize("variant", CASES)
def test_images_and_models_match_transformers(variant: str, tmp_path: Path) -> None:
    golden, found = recorded(variant), made(variant, tmp_path)
    images = [part for image in pictures(variant) for part in found.cut(image)]
    each = found.patches_per_row
    for i, image in enumerate(images):
        pixels = golden[f"pixels_{i}"]
        assert image.pixels.shape == pixels.shape and image.pixels.dtype == np.float32
        assert image.pixels.shape[1] == found.features and image.places.shape[1] == found.places
        # in whichever order the family has its patches
        assert np.abs(np.sort(image.pixels, axis=0) - np.sort(pixels, axis=0)).max() < 1e-6
        assert image.rows == len(pixels) // each <= found.most_rows
        assert image.rows == image.grid[0] * image.grid[1]
        assert found.smallest <= len(image.pixels) <= found.largest
        assert len(image.pixels) % found.smallest == 0
    module = bound(found, variant)
    size = sum(len(image.pixels) for image in images) + 3 * len(images) * found.smallest
    packed = encoded(found, module, images, -(-size // 256) * 256 if variant in SEVERAL else size, gap=3)
    for i, rows in enumerate(packed):
        assert np.abs(rows - golden[f"rows_{i}"]).max() < TOLERANCE
    [alone] = encoded(found, module, images[:1], len(images[0].pixels))
    assert np.abs(alone - golden["rows_0"]).max() < TOLERANCE
    logprobs = whole(variant, found, images, packed, tmp_path)
    assert np.abs(logprobs - golden["logprobs"]).max() < TOLERANCE


def whole(
    variant: str, found: Vision, images: list[Patches], rows: list[np.ndarray], folder: Path
) -> np.ndarray:
    """Log probabilities of a prompt with all images, whose tokens and positions are checked, too."""
    golden, texts = recorded(variant), text(variant, len(images))
    config = VARIANTS[variant]
    around = [[config[f"vision_{end}_token_id"]] if "vision_end_token_id" in config else [] for end in ENDS]
    tokens: list[int] = []
    for words, image in zip(texts, images, strict=False):
        tokens += [*words, *around[0], *found.prompt([image]), *around[1]]
    ids = np.array([*tokens, *texts[-1]], np.int32)
    here = ids == VISUAL
    assert np.where(here, found.row_token, ids).tolist() == golden["tokens"].tolist()
    write_model(folder, variant)
    model = build(read_config(folder), "float32", 512)
    positions, until = np.arange(len(ids)), None
    if model.config.rope.sections:
        positions, delta = mrope(ids.tolist(), [image.grid for image in images])
        assert positions.tolist() == golden["positions"].tolist() and delta == golden["delta"]
    if config["model_type"] in BOTH_WAYS:
        until = jnp.asarray(last_seen(ids.tolist(), [image.rows for image in images]))
    params = load(folder, model, make_mesh(1), progress=False)
    spread = np.full((len(ids), rows[0].shape[1]), np.nan, np.float32)
    spread[here] = np.concatenate(rows)

    def run(params: Any, tokens: jax.Array, positions: jax.Array, visual: Visual) -> jax.Array:
        module: Any = model.bind(params)
        attend: Any = WholeSequences(1, until, visual)
        if model.config.find(LinearAttention):
            attend = DenseCausal(jnp.zeros_like(tokens), jnp.arange(len(tokens)))  # with recurrent states
            attend.visual = visual
        return jax.nn.log_softmax(module.logits(module.hidden(tokens, positions, attend)))

    forward = jax.jit(run)
    return np.asarray(forward(params, np.where(here, 10**6, ids), positions, Visual(here, spread)))


def test_deeper_levels_are_in_the_order_of_their_layers(tmp_path: Path) -> None:
    """deepstack_visual_indexes need not ascend: each has a merger of its own."""
    found = made("qwen3_vl", tmp_path)
    module = bound(found, "qwen3_vl")
    images = [found.cut(picture)[0] for picture in pictures("qwen3_vl")[:1]]
    size = len(images[0].pixels)
    [expected] = encoded(found, module, images, size)
    module.taps, module.mergers = module.taps[::-1], nnx.List([*module.mergers][::-1])
    [rows] = encoded(found, module, images, size)
    np.testing.assert_array_equal(rows, expected)
    vision = {**VARIANTS["qwen3_vl"]["vision_config"], "deepstack_visual_indexes": [0, 7]}
    (tmp_path / "config.json").write_text(json.dumps({**VARIANTS["qwen3_vl"], "vision_config": vision}))
    with pytest.raises(ModelError, match=r"deepstack_visual_indexes=\[0, 7\] must be different layers"):
        vision_of(tmp_path, lambda text: [0])


def test_text_is_served_if_settings_of_images_are_not_supported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made("qwen3_vl", tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"do_normalize": False}))
    with caplog.at_level("WARNING", "jengine"):
        assert ModelSource.without_weights(EngineConfig.of(str(tmp_path), {})).vision is None
    assert "images are not read, only text is served: " in caplog.text and "do_normalize" in caplog.text
    asked = EngineConfig.of(str(tmp_path), {"limit_mm_per_prompt": {"image": 2}})
    with pytest.raises(ModelError, match="do_normalize=False is not supported"):
        ModelSource.without_weights(asked)


def test_tensors_of_an_encoder_are_all_used(tmp_path: Path) -> None:
    encoder = Encoder.of(made("qwen3_vl", tmp_path), "float32")
    tensors = {**weights("qwen3_vl"), "model.visual.blocks.9.norm1.weight": np.zeros(4, np.float32)}
    with pytest.raises(ModelError, match=r"visual.blocks.9.norm1.weight: is not part of this model"):
        encoder_makers(encoder.params, encoder.sources, in_memory(tensors))
