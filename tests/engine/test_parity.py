"""`verify`: tiny models against `Forward`, and models with a planted fault against the sound one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jengine import LLM, Forward, InvalidArgument, ModelError, Parity, ReferenceOutput, verify
from jengine.api.parity import _States
from jengine.cli import main
from tests.engine.on_demand import on_demand
from tests.engine.running import SMALL
from tests.golden.weights import write_model
from tests.text.conftest import byte_level, write

Reference = Callable[[np.ndarray], Any]
MODELS = [
    "llama_gqa", "qwen2_untied", "qwen3_untied", "gemma2", "gpt2", "phi3_window", "olmo2", "mistral_window",
    "granite", "cohere", "olmoe", "starcoder2",
]  # fmt: skip


def folder_of(path: Path, variant: str) -> Path:
    write_model(path, variant)
    write(byte_level(), path)
    return path


def reference_of(folder: Path, dtype: str = "float32") -> Reference:
    """The folder's model in `Forward`, which JAX compiles for one length."""
    forward = Forward(folder, dtype=dtype)
    params = forward.load()

    def reference(tokens: np.ndarray) -> ReferenceOutput:
        length = len(tokens)
        batch = jnp.asarray(np.pad(tokens, (0, 128 - length))[None])
        hidden = [np.asarray(state[0])[:length] for state in forward.hidden_states(params, batch)]
        return ReferenceOutput(np.asarray(forward.logits(params, batch)[0])[:length], hidden)

    return reference


def compared(folder: Path, reference: Reference, dtype: str = "float32", **options: Any) -> Parity:
    with on_demand():
        llm = LLM(folder, **{**SMALL, "dtype": dtype, "max_model_len": 128, "progress": False})
    with llm:
        return verify(llm, reference, **{"rollout": 8, **options})


@pytest.mark.parametrize(
    "variant", ["llama_gqa", *(pytest.param(name, marks=pytest.mark.full) for name in MODELS[1:])]
)
def test_equal_models(variant: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, variant)
    parity = compared(folder, reference_of(folder))
    assert parity.equal and parity.layer is None and parity.rollouts is not None
    assert (parity.prompts.tokens, parity.rollouts.tokens) == (253, 64)
    assert parity.prompts.largest < 1e-3 and parity.ratio is not None
    assert parity.ratio[0] == pytest.approx(1, abs=1e-3) and parity.ratio[2] == pytest.approx(1, abs=1e-3)
    assert json.loads(json.dumps(parity.plain()))["equal"] is True


def test_bfloat16_differs_by_rounding(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "llama_gqa")
    parity = compared(folder, reference_of(folder), "bfloat16")
    assert parity.equal and 1e-3 < parity.prompts.largest < 1 and parity.layers is not None
    assert 1e-3 < max(parity.layers) < 0.05
    narrow = compared(folder, reference_of(folder, "bfloat16"), "bfloat16")
    assert narrow.layers is not None and max(narrow.layers) == 0


def fault(folder: Path, kind: str) -> None:
    """Changes a model: its configuration, or a tensor of layer 1."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn"
    match kind:
        case "rope base":
            config["rope_theta"] *= 10
        case "epsilon":
            config["rms_norm_eps"] = 1e-3
        case "scale":
            tensors[f"{name}.v_proj.weight"] *= 1.01
        case "heads":
            heads = tensors[f"{name}.q_proj.weight"].reshape(config["num_attention_heads"], -1, 64)
            tensors[f"{name}.q_proj.weight"] = heads[[1, 0, *range(2, len(heads))]].reshape(-1, 64)
        case "bias":
            tensors[f"{name}.q_proj.bias"] *= 0
        case "dtype":
            tensors = {n: np.asarray(jnp.asarray(t, jnp.bfloat16), np.float32) for n, t in tensors.items()}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("kind", "layer"),
    [
        ("scale", 1),
        *(
            pytest.param(kind, layer, marks=pytest.mark.full)
            for kind, layer in (("rope base", 0), ("epsilon", 0), ("heads", 1), ("bias", 1), ("dtype", -1))
        ),
    ],
)
def test_a_fault_is_found_in_the_first_layer_that_differs(kind: str, layer: int, tmp_path: Path) -> None:
    sound = folder_of(tmp_path / "sound", "qwen2_untied")
    shutil.copytree(sound, tmp_path / "faulty")
    fault(tmp_path / "faulty", kind)
    parity = compared(tmp_path / "faulty", reference_of(sound))
    assert not parity.equal and parity.layer == layer and parity.layers is not None
    assert all(error < 2e-6 for error in parity.layers[: layer + 1])
    assert parity.prompts.largest > 1e-3
    if parity.prompts.first is not None:
        text, position, ours, theirs, margin = parity.prompts.first
        assert ours != theirs and margin > 0 and 0 <= text < 8 and position > 0


def test_references_of_another_form_are_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "llama_gqa")
    with on_demand():
        llm = LLM(folder, **SMALL, dtype="float32", max_model_len=128, progress=False)
    with llm:
        with pytest.raises(ModelError, match=r"logits are \(2, 3\), not \(2, 96\)"):
            verify(llm, lambda tokens: np.zeros((2, 3)), rollout=0)
        wrong = [np.zeros((2, 5))] * 2
        with pytest.raises(ModelError, match=r"hidden states are \[\(2, 5\), \(2, 5\)\], not 3 of \(2, 64\)"):
            verify(llm, lambda tokens: ReferenceOutput(np.zeros((len(tokens), 96)), wrong), rollout=0)
        for texts, count in (([[1]], 1), ([], 0)):
            with pytest.raises(InvalidArgument, match=f"texts='{count} tokens': there must be texts"):
                verify(llm, reference_of(folder), texts=texts)
        with pytest.raises(InvalidArgument, match="rollout=127: must be from 0 to 126"):
            verify(llm, reference_of(folder), rollout=127)
        nan = verify(llm, lambda tokens: np.full((len(tokens), 96), np.nan), texts=[[1, 2, 3]], rollout=0)
        assert (
            not nan.equal
            and np.isnan(nan.prompts.largest)
            and nan.rollouts is nan.ratio is nan.layers is None
        )
        assert nan.why_no_layers == "the reference gives none"


def test_models_without_hidden_states_by_layer(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "gemma3n_text")
    llm: Any = SimpleNamespace(started=SimpleNamespace(folder=folder, dtype="float32"))
    assert "earlier ones" in _States(llm).why or "embedding" in _States(llm).why
    with pytest.raises(ModelError, match="has no hidden states by layer"):
        Forward(folder).hidden_states({}, jnp.zeros((1, 4), jnp.int32))


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of(tmp_path / "model", "llama_gqa")
    (tmp_path / "trainer.py").write_text(
        "from tests.engine.test_parity import reference_of\n"
        f"sound = reference_of({str(folder)!r})\n"
        "def louder(tokens):\n    return sound(tokens).logits * 1.1\n"
    )
    monkeypatch.chdir(tmp_path)
    arguments = [
        "verify",
        str(folder),
        "--quiet",
        "--dtype",
        "float32",
        "--max-model-len",
        "128",
        "--rollout",
        "8",  # texts of lengths for which JAX has compiled the reference
    ]
    arguments += [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    with on_demand():
        assert main([*arguments, "--against", "trainer:sound"]) == 0
        shown = capsys.readouterr().out
        assert (
            "in float32 against trainer:sound: equal, but for rounding" in shown
            and "all within 2e-05" in shown
        )
        assert main([*arguments, "--against", "trainer:louder", "--json"]) == 1
        result = json.loads(capsys.readouterr().out)
        assert result["against"] == "trainer:louder"
        assert result["why_no_layers"] == "the reference gives none"
        for against, message in {
            "trainer": "must be transformers, or MODULE:FUNCTION",
            "trainer:nothing": "cannot be imported: module 'trainer' has no attribute 'nothing'",
        }.items():
            assert main([*arguments, "--against", against]) == 2
            assert message in capsys.readouterr().err
