"""Records what transformers computes for the tiny models, one file a variant, beside this script.

Run from the repository's root, in any Python with torch and transformers: python -m tests.golden.record [VARIANT ...]

A file holds, for prompt i of `lengths`: `prompt_i` int32[length], `tokens_i` int32[24], its greedy
continuation, `logits_i` float32[24, vocab], from which each of them was chosen, and for the lengths of
EVERYWHERE `everywhere_i` float32[length, vocab], the logits at every position of the prompt.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

from tests.golden.expert_variants import EXPERT_VARIANTS
from tests.golden.more_variants import MORE_VARIANTS
from tests.golden.weights import VARIANTS, max_model_len, uniform, write_model

NEW_TOKENS = 24
LENGTHS = (1, 5, 16, 17, 63, 65, 130)  # around pages of 16 and tiles of 64
FEWER = (1, 17, 65, 130)  # of MORE_VARIANTS and EXPERT_VARIANTS; EVERYWHERE then for the first alone
EVERYWHERE = (17, 65)
SAME = {"kimi_k2": "deepseek_v3"}  # model_types that transformers knows by another name
MARGIN = 1e-3  # between the two best tokens, for greedy tokens to be equal elsewhere


class Oracle:
    """A model that computes each sequence at once, padded to its maximum length, which fixes dynamic rotary
    frequencies as in the engine."""

    def __init__(self, variant: str) -> None:
        self.length = max_model_len(variant)
        with tempfile.TemporaryDirectory() as folder:
            kind = VARIANTS[variant]["model_type"]
            write_model(Path(folder), variant, model_type=SAME.get(kind, kind))
            parts = "text_config" in VARIANTS[variant]
            loader = transformers.AutoModelForImageTextToText if parts else transformers.AutoModelForCausalLM
            self.model = loader.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")

    def logits(self, tokens: list[int]) -> np.ndarray:
        """float32[len(tokens), vocab]."""
        padded = torch.tensor([tokens + [0] * (self.length - len(tokens))])
        with torch.no_grad():
            return self.model(padded, use_cache=False).logits[0, : len(tokens)].numpy()

    def continuation(self, prompt: list[int]) -> tuple[np.ndarray, float]:
        """float32[NEW_TOKENS, vocab] under greedy choice, and the smallest margin."""
        rows: list[np.ndarray] = []
        margin = np.inf
        for _ in range(NEW_TOKENS):
            rows.append(self.logits([*prompt, *(int(row.argmax()) for row in rows)])[-1])
            second, best = np.sort(rows[-1])[-2:]
            margin = min(margin, float(best - second))
        return np.stack(rows), margin


def record(variant: str) -> dict[str, np.ndarray]:
    config, oracle = VARIANTS[variant], Oracle(variant)
    more = variant in MORE_VARIANTS or variant in EXPERT_VARIANTS
    lengths = [n for n in (FEWER if more else LENGTHS) if n + NEW_TOKENS <= oracle.length]
    vocab = config.get("text_config", config)["vocab_size"]
    out: dict[str, np.ndarray] = {"config": np.array(json.dumps(config)), "lengths": np.array(lengths, np.int32)}
    margins = []
    for i, length in enumerate(lengths):
        for attempt in range(100):  # until the continuation is clear
            noise = uniform(f"{variant}/prompt/{length}/{attempt}", length)
            prompt = [int(x) for x in (noise / np.sqrt(12.0) + 0.5) * vocab]
            logits, margin = oracle.continuation(prompt)
            if margin > MARGIN:
                break
        else:
            raise SystemExit(f"{variant}: no prompt of {length} tokens has margins above {MARGIN}")
        margins.append(margin)
        out |= {f"prompt_{i}": np.array(prompt, np.int32), f"tokens_{i}": logits.argmax(1).astype(np.int32), f"logits_{i}": logits}
        if length in EVERYWHERE[: 1 if more else None]:
            out[f"everywhere_{i}"] = oracle.logits(prompt)
    return {**out, "smallest_margin": np.array(min(margins)), "transformers": np.array(transformers.__version__)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    for name in sys.argv[1:] or VARIANTS:
        arrays = record(name)
        path = Path(__file__).parent / f"{name}.npz"
        np.savez_compressed(path, **arrays)
        distinct = len(np.unique(np.concatenate([a for key, a in arrays.items() if key.startswith("tokens_")])))
        print(f"{name}: {path.stat().st_size} bytes, smallest margin {arrays['smallest_margin']:.4f}, {distinct} distinct tokens")
