"""Locating a model and reading its configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.utils import filter_repo_objects

import jengine
from jengine import SamplingParams
from jengine.base.errors import ModelError
from jengine.checkpoints import load, read_config, read_sampling_defaults, resolve
from jengine.checkpoints.folder import CONFIG_FILES, kept_format
from jengine.hub.files import TOKENIZER_FILES
from jengine.models import build
from jengine.models.config import RopeScaling
from jengine.parallel.mesh import make_mesh
from tests.checkpoints.quantized_models import nvfp4, write_quantized
from tests.golden.weights import VARIANTS


def write(folder: Path, **changes: Any) -> Path:
    """Writes a config.json; a field changed to ... is left out."""
    config = {name: value for name, value in {**VARIANTS["llama_gqa"], **changes}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_demo_is_the_packages_own() -> None:
    assert resolve("demo") == Path(jengine.__file__).parent / "demo"


HUB_ID = "a hub id is owner/name, such as Qwen/Qwen3-0.6B, or owner/name:Q4_K_M for a GGUF file"


def test_local_folder(tmp_path: Path) -> None:
    assert resolve(str(tmp_path)) == tmp_path


def test_hub_id_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    got: set[str] = set()

    def download(repo: str, *, revision: str | None, tqdm_class: object, **patterns: Any) -> str:
        assert (repo, revision) == ("someone/model", "v2")
        got.update(filter_repo_objects(files, **patterns))
        return str(tmp_path)

    wanted = {
        "config.json",
        "model.safetensors",
        "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
    }
    files = [
        *wanted,
        "original/consolidated.safetensors",
        "consolidated.safetensors",
        "onnx/config.json",
        "README.md",
        "pytorch_model.bin",
    ]
    (tmp_path / "config.json").touch()
    (tmp_path / "pytorch_model.bin").touch()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve("someone/model", "v2") == tmp_path
    assert got == {*wanted, "pytorch_model.bin"}, "there are no safetensors in the folder"
    got.clear()
    (tmp_path / "model.safetensors").touch()
    assert resolve("someone/model", "v2") == tmp_path
    assert got == wanted
    got.clear()
    resolve("someone/model", "v2", CONFIG_FILES)
    assert got == {"config.json"}
    got.clear()
    (tmp_path / "config.json").rename(tmp_path / "tokenizer_config.json")  # a repository with no model
    assert resolve("someone/model", "v2", TOKENIZER_FILES) == tmp_path
    assert got == wanted - {"model.safetensors"}


@pytest.mark.parametrize("failure", [OSError("no route\nto host"), ValueError("bad id"), RuntimeError("")])
def test_hub_failure_is_one_line(failure: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: object, **__: object) -> str:
        raise failure

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(
        ModelError, match=r"^someone/model: there is no such folder, and the hub has no such model: .+$"
    ) as caught:
        resolve("someone/model")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model", ["./nowhere", "/no/where", "~/nowhere-at-all", "a/b/c", "nowhere"])
def test_no_such_folder(model: str) -> None:
    with pytest.raises(ModelError, match="there is no such folder"):
        resolve(model)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("gpt2", f"gpt2: there is no such folder; {HUB_ID}"),
        ("nosuch.gguf", f"nosuch.gguf: there is no such file; {HUB_ID}"),
        ("./nosuch.gguf", "nosuch.gguf: there is no such file"),
    ],
)
def test_what_to_give_instead(model: str, message: str) -> None:
    with pytest.raises(ModelError) as wrong:
        resolve(model)
    assert str(wrong.value) == message


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "weights").touch()
    with pytest.raises(ModelError, match="is a file; a model is a GGUF file or a folder"):
        resolve(str(tmp_path / "weights"))


def test_configuration(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, eos_token_id=7))
    assert (config.family, config.num_heads, config.num_kv_heads, config.group, config.head_dim) == (
        "llama",
        8,
        2,
        4,
        8,
    )
    assert (config.vocab_size, config.hidden_size, config.intermediate_size, config.num_layers) == (
        96,
        64,
        112,
        2,
    )
    assert (config.max_position, config.norm_eps, config.rope.theta, config.rope.scaling) == (
        256,
        1e-5,
        10000.0,
        None,
    )
    assert config.eos_token_ids == (7,)


def test_settings_in_model_optimizers_own_file(tmp_path: Path) -> None:
    """As its releases up to 0.29 write them, with those of the cache, whose scales are not used."""
    quantization = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*.o_proj"]}
    write_quantized(tmp_path, quantization, nvfp4, plain=("o_proj.weight",))
    config, file = read_config(tmp_path), tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": None}))
    settings = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16}
    settings["exclude_modules"] = quantization["ignore"]
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": settings}))
    assert read_config(tmp_path) == config and config.stored is not None
    assert load(tmp_path, build(config, "float32", 64), make_mesh(1), progress=False)
    assert kept_format("modelopt", tmp_path) is None
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": null}}')
    assert read_config(tmp_path).stored is None
    (tmp_path / "hf_quant_config.json").write_text("{}")
    with pytest.raises(ModelError, match="quantization"):
        read_config(tmp_path)


def test_fields_that_may_be_left_out(tmp_path: Path) -> None:
    config = read_config(
        write(tmp_path, num_key_value_heads=..., rms_norm_eps=..., rope_theta=..., eos_token_id=...)
    )
    assert (config.num_kv_heads, config.norm_eps, config.rope.theta, config.eos_token_ids) == (
        8,
        1e-6,
        10000.0,
        (),
    )


def test_rope_scaling_old_and_new_spelling(tmp_path: Path) -> None:
    old = read_config(write(tmp_path, rope_scaling={"type": "linear", "factor": 2}, rope_theta=5e5))
    new = read_config(
        write(
            tmp_path, rope_theta=..., rope_parameters={"rope_type": "linear", "factor": 2, "rope_theta": 5e5}
        )
    )
    assert old == new
    assert old.rope.scaling == RopeScaling(kind="linear", factor=2.0, original_max_position=256)


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({"eos_token_id": 3}, (3,)),
        ({"eos_token_id": [3, 4]}, (3, 4)),
        ({"eos_token_id": None}, (7,)),
        ({}, (7,)),
        (None, (7,)),
    ],
)
def test_generation_config_names_the_end_of_sequence(
    tmp_path: Path, generation: dict[str, Any] | None, expected: tuple[int, ...]
) -> None:
    write(tmp_path, eos_token_id=7)
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert read_config(tmp_path).eos_token_ids == expected


@pytest.mark.parametrize("eos", ["</s>", [1, "2"], True, -1])
def test_generation_config_with_a_wrong_end_of_sequence(tmp_path: Path, eos: object) -> None:
    write(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(
        ModelError, match=r"generation_config\.json: eos_token_id=.* is neither a token id nor a list of them"
    ):
        read_config(tmp_path)


def test_generation_config_recommends_sampling_parameters(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path) == SamplingParams()
    file = tmp_path / "generation_config.json"
    file.write_text(
        json.dumps(
            {
                "temperature": 0.6,
                "top_k": 20,
                "max_new_tokens": 99,
                "min_p": None,
                "do_sample": True,
                "num_beams": 1,
            }
        )
    )
    assert read_sampling_defaults(tmp_path) == SamplingParams(temperature=0.6, top_k=20, max_tokens=99)
    file.write_text(json.dumps({"top_p": 7}))
    with pytest.raises(ModelError, match=r"generation_config\.json: top_p=7: must be in \(0, 1\]"):
        read_sampling_defaults(tmp_path)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"hidden_size": ...}, "field 'hidden_size' is missing"),
        ({"model_type": ...}, "field 'model_type' is missing"),
        ({"vocab_size": "many"}, "a field has the wrong type or value"),
        ({"rope_scaling": "yarn"}, "a field has the wrong type or value"),
        ({"num_attention_heads": 0}, "a field has the wrong type or value"),
        ({"num_hidden_layers": 0}, "num_layers=0 must be at least 1"),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 4},
            "num_attention_heads=6 is not a multiple of num_key_value_heads=4",
        ),
        ({"head_dim": 7}, "head_dim=7 must be even"),
        (
            {"rope_scaling": {"rope_type": "ntk", "factor": 2}},
            "rope scaling 'ntk' is not supported; linear, dynamic",
        ),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "field 'short_factor' is missing"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "field 'factor' is missing"),
        ({"use_sliding_window": True}, "use_sliding_window is not supported"),
        (
            {"quantization_config": {"quant_method": "nvfp4"}},
            "quantization_config.quant_method .nvfp4. is not supported",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported"),
    ],
)
def test_wrong_configuration(tmp_path: Path, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ModelError, match=rf"config\.json: {match}"):
        read_config(write(tmp_path, **changes))


@pytest.mark.parametrize(
    ("content", "match"), [(None, "is missing"), ("{", "is not valid JSON"), ("[]", "is not a JSON object")]
)
def test_unreadable_configuration(tmp_path: Path, content: str | None, match: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=rf"config\.json: {match}"):
        read_config(tmp_path)
