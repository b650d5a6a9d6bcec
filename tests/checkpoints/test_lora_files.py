"""LoRA adapters in PEFT's format: what is read, and what is rejected by name."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import huggingface_hub
import jax
import numpy as np
import pytest

from jengine.base.errors import InvalidArgument, ModelError, shown
from jengine.checkpoints.hugging_face import model_config
from jengine.checkpoints.lora import read_lora
from jengine.core.lora import LoraSource
from jengine.execution.loras import HEADER, LoraShapes, write
from jengine.models import Model, build
from jengine.models.adapters import LoraWeights, sites
from jengine.parallel.mesh import make_mesh
from pallas_kernels.products.adapted import columns_of
from tests.golden.loras import Lora, lora, write_lora
from tests.golden.variants import VARIANTS

PREFIX = "base_model.model.model.layers.0.self_attn"
Q, QB = (f"{PREFIX}.q_proj.lora_{side}.weight" for side in "AB")


def model(variant: str = "llama_gqa") -> Model:
    return build(model_config(dict(VARIANTS[variant])), "float32", 64)


def shapes_of(model: Model, places: int = 2, rank: int = 8, **how: Any) -> LoraShapes:
    return LoraShapes(model, make_mesh(1), places, rank, **how)


def read(folder: Path, variant: str = "llama_gqa", dtype: str = "float32") -> LoraWeights:
    return read_with(shapes_of(model(variant)), folder, dtype)


def read_with(shapes: LoraShapes, folder: Path, dtype: str = "float32") -> LoraWeights:
    source = LoraSource("x", str(folder))
    return read_lora(source, shapes.modules, shapes.model, 8, shapes.fused, dtype)


def test_every_module_has_its_change(tmp_path: Path) -> None:
    adapter = lora("llama_gqa", "rs")
    weights = read(write_lora(tmp_path, adapter))
    assert weights.rank == 8 and len(weights.factors) == 7 * VARIANTS["llama_gqa"]["num_hidden_layers"]
    for layer, r in ((0, 2), (1, 8)):
        a, b = weights.factors[f"layers.{layer}.self_attn.q_proj"]
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        np.testing.assert_array_equal(a, adapter.tensors[f"{name}.lora_A.weight"])
        np.testing.assert_allclose(b, 4 / r**0.5 * adapter.tensors[f"{name}.lora_B.weight"], rtol=1e-6)


def test_an_adapter_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its repository has no config.json."""
    folder, wanted = write_lora(tmp_path, lora("llama_gqa", "plain")), set[str]()

    def download(repo: str, *, allow_patterns: list[str], **_: Any) -> str:
        wanted.update([repo, *allow_patterns])
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert read(Path("someone/adapter")).factors
    assert wanted == {"someone/adapter", "adapter_config.json", "adapter_model.safetensors"}


def change(tmp_path: Path, config: dict[str, Any], tensors: dict[str, Any]) -> Path:
    """Writes the plain adapter with changes; a tensor of None is left out."""
    config = {**lora("llama_gqa", "plain").config, **config}
    mixed = {**lora("llama_gqa", "plain").tensors, **tensors}
    return write_lora(tmp_path, Lora(config, {k: v for k, v in mixed.items() if v is not None}))


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


@pytest.mark.parametrize(
    ("config", "tensors", "says"),
    [
        ({"use_dora": True}, {}, "use_dora=True: DoRA is not supported"),
        ({"modules_to_save": ["lm_head"]}, {}, r"modules_to_save=\['lm_head'\]: whole modules are not"),
        ({"bias": "all"}, {}, "bias='all': biases are not changed"),
        ({"peft_type": "IA3"}, {}, "peft_type 'IA3' is not supported; LORA is"),
        ({"init_lora_weights": "pissa"}, {}, "init_lora_weights='pissa' changes the model's own weights"),
        ({"r": 8}, {}, "has rank 4, but the configuration says r=8"),
        ({"r": 0}, {}, "r=0 must be a whole number of at least 1"),
        ({"r": 4.0}, {}, "r=4.0 must be a whole number"),
        *(({"lora_alpha": alpha}, {}, "lora_alpha=.* must be a finite number|not valid JSON")
          for alpha in ("x", [8], True, float("nan"), float("inf"), 10**400)),
        ({"lora_alpha": 1e40}, {}, r"lora_alpha=1e\+40 of module .* scale that is not finite in float32"),
        ({"alpha_pattern": {"q_proj": float("nan")}}, {}, "NaN is not a number of JSON"),
        ({"rank_pattern": {"q_proj": 0}}, {}, "rank_pattern 'q_proj'=0 must be a whole number of at least 1"),
        ({"rank_pattern": [4]}, {}, r"rank_pattern=\[4\] must be an object"),
        ({"rank_pattern": {"(": 4}}, {}, r"rank_pattern '\(': is no regular expression"),
        ({"use_rslora": "yes"}, {}, "use_rslora='yes' must be true or false"),
        ({"target_modules": 5}, {}, "target_modules=5 must be text, or a list of names"),
        ({"target_modules": ["\ud800\n"], "exclude_modules": ".*k"}, {}, "has a lone surrogate"),
        ({"target_modules": "("}, {}, r"target_modules '\(': is no regular expression"),
        ({"exclude_modules": [["q_proj"]]}, {}, "exclude_modules=.* must be text, or a list of names"),
        ({"target_modules": ["nothing"], "exclude_modules": "("}, {}, r"exclude_modules '\(': is no regular"),
        ({"target_parameters": "experts"}, {}, "target_parameters='experts' must be a list of names"),
        ({"peft_type": ["LORA"]}, {}, r"peft_type=\['LORA'\] must be text"),
        ({"target_modules": ["nothing"]}, {}, r"target_modules=\['nothing'\] matches no module"),
        ({"target_modules": ["q_proj", "lm_head"]}, {}, "target_modules has 'lm_head', but no module"),
        ({"target_modules": "nothing.*"}, {}, "target_modules='nothing.*' matches no module"),
        ({}, {Q: None}, r"module model\.layers\.0\.self_attn\.q_proj has no lora_A"),
        ({}, {Q: ones(4, 5)}, r"q_proj has 5 inputs and \d+ outputs; the model's \d+ and \d+"),
        ({}, {Q: ones(3, 64)}, "q_proj: lora_A has rank 3, lora_B has 4"),
        *(({}, {Q: np.full((4, 64), bad, np.float64)}, "lora_A of module .*q_proj has a number that is not")
          for bad in (np.inf, np.nan, 1e300)),
        ({}, {QB: np.full((64, 4), 3e38, np.float32)}, "lora_B of module .*q_proj .* by the scale 2$"),
        ({}, {Q: ones(0, 64), QB: ones(64, 0)}, r"q_proj.lora_[AB].*must be a matrix of floats"),
        ({}, {Q.replace(".model.layers", ".layers"): ones(4, 64),
              QB.replace(".model.layers", ".layers"): ones(64, 4)}, "module layers.*q_proj is given twice"),
        ({}, {f"{'x' * 2000}.lora_A.weight": ones(4, 64)}, "is not supported"),
        ({}, {f"{PREFIX}.q_proj.lora_magnitude_vector.weight": ones(4)}, "lora_magnitude.*DoRA"),
        ({}, {"base_model.model.lm_head.lora_A.weight": ones(4, 64),
              "base_model.model.lm_head.lora_B.weight": ones(96, 4)}, "no module lm_head .*target_modules"),
        ({}, {"base_model.model.model.embed_tokens.lora_embedding_A": ones(4, 96),
              "base_model.model.model.embed_tokens.lora_embedding_B": ones(64, 4)}, "no module model.embed"),
        ({}, {"base_model.model.model.embed_tokens.base_layer.weight": ones(96, 64)}, "embedding_layers=F"),
        ({"target_parameters": ["experts.down_proj"]}, {}, "target_parameters has 'experts.down_proj', but"),
        ({}, {"base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight": ones(4, 64),
              "base_model.model.model.layers.9.self_attn.q_proj.lora_B.weight": ones(64, 4)},
         r"no module model\.layers\.9\.self_attn\.q_proj"),
        ({}, {f"{PREFIX}.q_proj.bias": ones(64)}, "biases are not changed"),
    ],
)  # fmt: skip
def test_what_would_not_take_effect_is_an_error(
    config: dict[str, Any], tensors: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=says):
        read(change(tmp_path, config, tensors))


@pytest.mark.parametrize(
    ("dtype", "largest"), [("float32", 3.4028234e38), ("bfloat16", 3.3895e38), ("float16", 65504.0)]
)
def test_numbers_are_checked_in_the_dtype_of_the_devices(dtype: str, largest: float, tmp_path: Path) -> None:
    """After the scale, which is 2 here: the largest number is read, and the next one is not."""
    for name, number in ((Q, largest), (QB, largest / 2)):
        shape = (4, 64) if name == Q else (64, 4)
        folder = change(tmp_path / name / "ok", {}, {name: np.full(shape, number, np.float32)})
        factors = read(folder, dtype=dtype).factors["layers.0.self_attn.q_proj"]
        assert {array.dtype.name for array in factors} == {dtype}
        folder = change(tmp_path / name / "bad", {}, {name: np.full(shape, 1.01 * number, np.float64)})
        with pytest.raises(ModelError, match=f"has a number that is not finite in {dtype}"):
            read(folder, dtype=dtype)


SLOW = r"([a-z_.0-9]+)+!"  # a backtracking engine tries each division of a name


def test_patterns_that_would_never_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jengine.checkpoints.lora_config.SECONDS", 1)
    without_k = {name: None for name in lora("llama_gqa", "plain").tensors if "k_proj" in name}
    for field, tensors, config in (
        ("rank_pattern", {}, {"rank_pattern": {"v_proj": 4, SLOW: 2}}),
        ("target_modules", {}, {"target_modules": SLOW}),
        ("exclude_modules", without_k, {"target_modules": ["q_proj", "k_proj"], "exclude_modules": SLOW}),
    ):
        folder = change(tmp_path / field, config, tensors)
        with pytest.raises(ModelError, match=f"{field} {re.escape(shown(SLOW))}: takes too long"):
            read(folder)


@pytest.mark.parametrize(
    ("excluded", "is_read"),
    [
        (["k_proj"], True),
        (r".*\.k_proj", True),
        (r"model\.layers\.\d+\.self_attn\.(k|x)_proj", True),
        ([f"layers.{i}.self_attn.k_proj" for i in range(VARIANTS["llama_gqa"]["num_hidden_layers"])], True),
        (["layers.0.self_attn.k_proj"], False),
        (r"layers\..*\.k_proj", False),
        (["v_proj"], False),
        (None, False),
    ],
)
def test_a_target_may_have_no_tensors_if_all_its_modules_are_excluded(
    excluded: object, is_read: bool, tmp_path: Path
) -> None:
    """As PEFT saves target_modules="all-linear" with exclude_modules: the targets are those of the model."""
    without_k = {name: None for name in lora("llama_gqa", "plain").tensors if "k_proj" in name}
    config = {"target_modules": ["q_proj", "k_proj"], "exclude_modules": excluded}
    folder = change(tmp_path, config, without_k)
    if is_read:
        assert not any("k_proj" in name for name in read(folder).factors)
    else:
        with pytest.raises(ModelError, match="target_modules has 'k_proj', but no module of it has tensors"):
            read(folder)


def test_targets_that_the_model_has_not_are_ignored(tmp_path: Path) -> None:
    """As in PEFT: the usual lists name projections that are one matrix in some models."""
    folder = change(tmp_path, {"target_modules": ["q_proj", "qkv_proj", "nothing"]}, {})
    assert read(folder).factors
    adapter = lora("qwen3_moe", "rs")
    tensors = {name: array for name, array in adapter.tensors.items() if "q_proj" in name}
    config = {**adapter.config, "target_modules": ["q_proj", "up_proj"], "target_parameters": None}
    folder = write_lora(tmp_path / "experts", Lora(config, tensors))
    weights = read_with(shapes_of(model("qwen3_moe"), targets=("q_proj", "experts")), folder)
    assert all(name.endswith("q_proj") for name in weights.factors), "modules of experts may have no tensors"


def test_the_gates_of_a_delta_net_can_be_adapted() -> None:
    """They are small matrices that are never quantized, and linear layers as others."""
    for variant, names in (("qwen3_next", ("in_proj_ba",)), ("qwen3_5_text", ("in_proj_a", "in_proj_b"))):
        modules = shapes_of(model(variant)).modules
        for name in (*names, "out_proj"):
            assert f"layers.0.linear_attn.{name}" in modules
    assert "layers.0.mlp.shared_expert_gate" in shapes_of(model("qwen3_next")).modules
    assert not any(name.endswith("mlp.gate") for name in shapes_of(model("qwen3_next")).modules)


def test_broken_files(tmp_path: Path) -> None:
    folder = write_lora(tmp_path / "a", lora("llama_gqa", "plain"))
    tensors = folder / "adapter_model.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-100])
    with pytest.raises(ModelError, match="is truncated"):
        read(folder)
    tensors.unlink()
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors: is missing"):
        read(folder)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"adapter_config\.json: is not valid JSON"):
        read(folder)
    with pytest.raises(ModelError, match="there is no such folder"):
        read(tmp_path / "nowhere")
    empty = write_lora(tmp_path / "b", Lora({"r": 4, "lora_alpha": 4}, {"x": ones(1)}))
    with pytest.raises(ModelError, match="tensor x: is not supported"):
        read(empty)


def test_ranks_above_the_limit_are_rejected(tmp_path: Path) -> None:
    folder, shapes = write_lora(tmp_path, lora("llama_gqa", "rs")), shapes_of(model())
    with pytest.raises(ModelError, match="has rank 8, above max_lora_rank=4"):
        read_lora(LoraSource("x", str(folder)), shapes.modules, shapes.model, 4)


@pytest.mark.parametrize(
    ("variant", "targets"),
    [
        *((name, None) for name in ("llama_gqa", "gpt_neox", "gpt2", "qwen3_5_text", "phi3_window")),
        ("qwen3_moe", ("experts.up_proj", "embed_tokens")),
    ],
)
def test_a_written_adapter_is_at_its_place_alone(variant: str, targets: tuple[str, ...] | None) -> None:
    """And other places keep what they have."""
    shapes = shapes_of(model(variant), places=3, targets=targets)
    factors = {
        module.name: (ones(2, module.shape[1]), ones(module.shape[0], 2))
        for module in shapes.modules.values()
    }
    packed = shapes.pack(LoraWeights(2, factors))[HEADER:].view(np.float32).reshape(1, -1)
    stacks = jax.tree.map(lambda x: np.full(x.shape, 7, np.float32), shapes.stacks)
    written = jax.jit(write)(stacks, packed, np.ones(1, np.int32))
    columns = shapes.columns
    for site, stack in zip(shapes.sites, written, strict=True):
        for array, axis in [(stack.a, stack.a.ndim - 2), *((b, b.ndim - 1) for b in stack.b)]:
            first, own, last = np.split(np.asarray(array), 3, axis)
            assert (first == 7).all() and (last == 7).all()
            assert own.shape[axis] == columns
            rank, rest = np.split(own, [2], axis)
            assert (rest == 0).all()
            assert set(np.unique(rank)) <= {0.0, 1.0} and rank.any(), site


def test_targets_choose_parameters() -> None:
    """A target is a part of modules' names. What is fused with its module belongs to it."""
    both = shapes_of(model("qwen3_moe"), targets=("layers.0.self_attn.k_proj", "experts.down_proj"))
    assert sorted(name for name in both.modules if "experts" not in name) == [
        f"layers.0.self_attn.{name}_proj" for name in "kqv"
    ]
    assert sorted(both.fused) == [f"layers.{i}.mlp.experts.down_proj" for i in range(len(both.fused))]
    with pytest.raises(InvalidArgument, match="lora_target_modules='w1': must name modules"):
        sites(model("qwen3_moe"), ("q_proj", "w1"))


def test_factors_of_all_experts_in_one_matrix(tmp_path: Path) -> None:
    """Wrong shapes are rejected, as those of modules are."""
    shapes, adapter = shapes_of(model("qwen3_moe"), targets=("self_attn", "experts")), lora("qwen3_moe", "rs")
    name = "base_model.model.model.layers.1.mlp.experts.lora_B.weight"
    number = 2 * 6 + 3  # second axis: rank 2, expert 3
    weights = read_with(shapes, write_lora(tmp_path / "a", adapter))
    _, b = weights.factors["layers.1.mlp.experts.3.down_proj"]
    np.testing.assert_allclose(b[:, 2], 4 / 8**0.5 * adapter.tensors[name][:, number], rtol=1e-6)
    for shape in ((64, 47), (63, 48)):
        tensors = {**adapter.tensors, name: ones(*shape)}
        folder = write_lora(tmp_path / str(shape), Lora(adapter.config, tensors))
        with pytest.raises(ModelError, match=r"no module model\.layers\.1\.mlp\.experts"):
            read_with(shapes, folder)


@pytest.mark.parametrize(("rank", "columns"), [(1, 16), (16, 16), (17, 32), (64, 64), (65, 128), (320, 320)])
def test_columns_of_a_place(rank: int, columns: int) -> None:
    assert columns_of(rank) == columns


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_pipe_in_the_folder_is_refused_at_once(name: str, tmp_path: Path) -> None:
    write_lora(tmp_path, lora("llama_gqa", "plain"))
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(ModelError, match="is not a regular file") as caught:
        read(tmp_path)
    assert caught.value.file == tmp_path / name
