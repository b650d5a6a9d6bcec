"""Records what PEFT and transformers compute for the tiny models with adapters: lora_VARIANT.npz.

Run from the repository's root, in any Python with torch, transformers and peft:
python -m tests.golden.record_lora [VARIANT ...]
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import peft
import torch
import transformers

from tests.golden.loras import SETTINGS, VARIANTS_WITH_LORA, lora, write_lora
from tests.golden.record import MARGIN, Oracle
from tests.golden.variants import VARIANTS
from tests.golden.weights import uniform

LENGTHS = (5, 65)


def record(variant: str) -> dict[str, np.ndarray]:
    config = VARIANTS[variant]
    vocab = config.get("text_config", config)["vocab_size"]
    out: dict[str, np.ndarray] = {"config": np.array(json.dumps(config))}
    lengths, margins, i = [], [], 0
    for name in SETTINGS:
        oracle = Oracle(variant)
        with tempfile.TemporaryDirectory() as folder:
            path = write_lora(Path(folder), lora(variant, name))
            oracle.model = peft.PeftModel.from_pretrained(oracle.model, path).eval()
        for length in LENGTHS:
            for attempt in range(100):  # until the continuation is clear
                noise = uniform(f"{variant}/{name}/prompt/{length}/{attempt}", length)
                prompt = [int(x) for x in (noise / np.sqrt(12.0) + 0.5) * vocab]
                logits, margin = oracle.continuation(prompt)
                if margin > MARGIN:
                    break
            else:
                raise SystemExit(f"{variant}: no prompt of {length} tokens has margins above {MARGIN}")
            margins.append(margin)
            lengths.append(length)
            out |= {
                f"prompt_{i}": np.array(prompt, np.int32),
                f"tokens_{i}": logits.argmax(1).astype(np.int32),
                f"logits_{i}": logits,
            }
            i += 1
    return {
        **out,
        "lengths": np.array(lengths, np.int32),
        "smallest_margin": np.array(min(margins)),
        "transformers": np.array(transformers.__version__),
        "peft": np.array(peft.__version__),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    for name in sys.argv[1:] or VARIANTS_WITH_LORA:
        arrays = record(name)
        path = Path(__file__).parent / f"lora_{name}.npz"
        np.savez_compressed(path, **arrays)
        print(f"{name}: {path.stat().st_size} bytes, smallest margin {arrays['smallest_margin']:.4f}")
