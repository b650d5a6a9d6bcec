"""Reduced versions of published repositories: each loads, or is rejected by name with the reason."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from jengine import LLM, SamplingParams
from jengine.base.errors import ModelError
from jengine.checkpoints import load, read_config, resolve
from jengine.checkpoints.stored import dense
from jengine.checkpoints.weights import read
from jengine.models import build
from jengine.parallel.mesh import make_mesh
from jengine.text.tokenizer import Tokenizer
from tests.checkpoints.layouts import LAYOUTS
from tests.checkpoints.writing import write

LOADED = [name for name, layout in LAYOUTS.items() if layout.rejected is None]
SERVED = (  # of each kind of files, and of tokenizers
    "meta-llama/Llama-2-7b-hf",
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503",
    "facebook/opt-350m",
    "google/gemma-3-4b-it",
    "Qwen/Qwen2.5-7B-Instruct-AWQ",
    "TheBloke/Llama-2-7B-GPTQ",
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8",
    "Qwen/Qwen3-8B-FP8",
    "Qwen/Qwen3-0.6B-GGUF",
)


@pytest.mark.parametrize("name", LOADED)
@pytest.mark.filterwarnings("ignore:.*tensors of .* are not loaded")
def test_loads(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    written = write(tmp_path, layout)
    path = resolve(str(tmp_path))
    config = read_config(path)
    assert config.family == layout.config["model_type"] and (config.vocab_size, config.hidden_size) == (
        512,
        layout_size(name),
    )
    model = build(config, "float32", 64)
    if config.stored is None:  # what is stored in fewer bits would be packed by compiled functions
        assert load(path, model, make_mesh(1), progress=False).keys() == model.params.keys()
    tensors = read(path, model)
    for tensor in tensors:
        if tensor in written:
            np.testing.assert_allclose(
                np.asarray(dense(tensors[tensor].array), np.float32),
                written[tensor].astype(np.float32),
                atol=1e-6,
            )
    assert len(tensors.keys() & written.keys()) >= 2 * 7
    tokenizer = Tokenizer.load(path)
    assert tokenizer.decode(tokenizer.encode("the fox")).strip() == "the fox"


def layout_size(name: str) -> int:
    config = LAYOUTS[name].config
    return int(
        config.get("text_config", config).get("hidden_size") or config.get("n_embed") or config["n_embd"]
    )


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name not in LOADED])
def test_rejected_by_name(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    write(tmp_path, layout)
    with pytest.raises(ModelError, match=re.escape(str(tmp_path)) + ".*" + re.escape(str(layout.rejected))):
        read(tmp_path, build(read_config(tmp_path), "float32", 64))


def test_there_are_sixty() -> None:
    assert len(LAYOUTS) >= 60 and {*SERVED} <= {*LOADED}


@pytest.mark.full
@pytest.mark.parametrize("name", SERVED)
@pytest.mark.filterwarnings("ignore:.*tensors of .* are not loaded")
def test_generates(name: str, tmp_path: Path) -> None:
    write(tmp_path, LAYOUTS[name])
    llm = LLM(str(resolve(str(tmp_path))), dtype="float32", max_model_len=64, max_num_seqs=2, progress=False)
    (output,) = llm.generate(
        ["the fox"], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True), use_tqdm=False
    )
    assert len(output.outputs[0].token_ids) == 4
