"""Records which files save_pretrained of the current transformers writes for the tiny models: saved.npz.

Run from the repository's root, in any Python with torch and transformers: python -m tests.golden.record_saved
[VARIANT ...]

For each variant, as JSON: `loaded_VARIANT`, of a model that was loaded from the published layout, and
`made_VARIANT`, of one that was made from the configuration: {"config": the fields of config.json, "tensors":
{name: shape}}.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import safe_open

from tests.golden.record import NO_IMAGES, SAME, TEXT_ALONE
from tests.golden.weights import VARIANTS, write_model

FILE = Path(__file__).parent / "saved.npz"


def saved(model: Any) -> str:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        with safe_open(Path(folder) / "model.safetensors", "np") as file:
            tensors = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        config = json.loads((Path(folder) / "config.json").read_text())
        return json.dumps({"config": config, "tensors": tensors})


def record(variant: str) -> dict[str, np.ndarray]:
    kind = VARIANTS[variant]["model_type"]
    parts = not {"text_config", "vision_config"}.isdisjoint(VARIANTS[variant]) and kind not in TEXT_ALONE
    auto = transformers.AutoModelForImageTextToText if parts else transformers.AutoModelForCausalLM
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), variant, model_type=SAME.get(kind, kind), **NO_IMAGES.get(kind, {}))
        if kind in TEXT_ALONE:
            (Path(folder) / "config.json").write_text(json.dumps(VARIANTS[variant]["text_config"]))
        loaded = auto.from_pretrained(folder, dtype=torch.float32)
        made = auto.from_config(transformers.AutoConfig.from_pretrained(folder))
    return {f"loaded_{variant}": np.array(saved(loaded)), f"made_{variant}": np.array(saved(made))}


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    found = dict(np.load(FILE)) if FILE.exists() else {}
    for name in sys.argv[1:] or VARIANTS:
        found |= record(name)
        print(name, flush=True)
    found["transformers"] = np.array(transformers.__version__)
    np.savez_compressed(FILE, **found)
