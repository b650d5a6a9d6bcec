"""Records what transformers computes for the tiny embedding model, beside this script; see
embedding_models.py.

Run from the repository's root, in any Python with torch and transformers: python -m
tests.golden.record_embeddings
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

from tests.golden.embedding_models import CONFIG, FALSE, FILE, TRUE, VARIANT, write_model
from tests.golden.weights import uniform

LENGTHS = (1, 17, 65, 130)  # around pages of 16 and tiles of 64


def record() -> dict[str, np.ndarray]:
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
    out: dict[str, np.ndarray] = {"transformers": np.array(transformers.__version__)}
    probabilities = []
    for i, length in enumerate(LENGTHS):
        noise = uniform(f"{VARIANT}/prompt/{length}", length)
        prompt = ((noise / np.sqrt(12.0) + 0.5) * CONFIG["vocab_size"]).astype(np.int32)
        with torch.no_grad():
            hidden = model.model(
                torch.tensor(prompt[None].astype(np.int64)), use_cache=False
            ).last_hidden_state[0]
            logits = model.lm_head(hidden[-1])
        probabilities.append(torch.softmax(logits[[TRUE, FALSE]], 0)[0].item())
        out |= {f"prompt_{i}": prompt, f"last_{i}": hidden[-1].numpy(), f"mean_{i}": hidden.mean(0).numpy()}
    return {**out, "probability": np.array(probabilities, np.float32)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    arrays = record()
    np.savez_compressed(FILE, **arrays)
    print(f"{FILE.name}: {FILE.stat().st_size} bytes, probabilities {arrays['probability']}")
