"""Records what transformers computes for the tiny models, one file a variant, beside this script.

Run from the repository's root, in any Python with torch and transformers: python -m tests.golden.record
[VARIANT ...]

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

from tests.golden.variants import ALL_LENGTHS
from tests.golden.weights import VARIANTS, max_model_len, uniform, write_model

NEW_TOKENS = 24
LENGTHS = (1, 5, 16, 17, 63, 65, 130)  # around pages of 16 and tiles of 64
FEWER = (1, 17, 65, 130)  # of variants that are not in ALL_LENGTHS; EVERYWHERE then for the first alone
EVERYWHERE = (17, 65)
SAME = {
    "kimi_k2": "deepseek_v3",
    "mimo": "qwen2",
    "minimax_m1": "minimax",
    "minimax_text_01": "minimax",
}  # model_types that transformers knows by another name
TEXT_ALONE = ("gemma3n",)  # whose other parts need further packages
MARGIN = 1e-3  # between the two best tokens, for greedy tokens to be equal elsewhere
# Recorded in float64, with prompts where float32 comes close to it. A delta rule's result is normed: where
# query and key are almost orthogonal at the first token, that amplifies the rounding of whatever order a sum
# is computed in.
IN_FLOAT64 = ("qwen3_5_moe_text",)
ROUNDING = 3e-5  # the most that transformers' own float32 may differ there


# a random text has the token of images, too
NO_IMAGES = {"gemma4": {"image_token_id": 10**6}}


class Oracle:
    """A model that computes each sequence at once, padded to its maximum length, which fixes dynamic rotary
    frequencies as in the engine."""

    def __init__(self, variant: str, dtype: torch.dtype = torch.float32) -> None:
        self.length = max_model_len(variant)
        with tempfile.TemporaryDirectory() as folder:
            kind = VARIANTS[variant]["model_type"]
            write_model(Path(folder), variant, model_type=SAME.get(kind, kind), **NO_IMAGES.get(kind, {}))
            parts = not {"text_config", "vision_config"}.isdisjoint(VARIANTS[variant])
            parts = parts and kind not in TEXT_ALONE
            if kind in TEXT_ALONE:
                (Path(folder) / "config.json").write_text(json.dumps(VARIANTS[variant]["text_config"]))
            loader = transformers.AutoModelForImageTextToText if parts else transformers.AutoModelForCausalLM
            how = {"attn_implementation": "eager", "experts_implementation": "eager"}
            self.model = loader.from_pretrained(folder, dtype=dtype, **how)

    def logits(self, tokens: list[int]) -> np.ndarray:
        """float32[len(tokens), vocab]."""
        padded = torch.tensor([tokens + [0] * (self.length - len(tokens))])
        with torch.no_grad():
            return self.model(padded, use_cache=False).logits[0, : len(tokens)].float().numpy()

    def continuation(self, prompt: list[int]) -> tuple[np.ndarray, float]:
        """float32[NEW_TOKENS, vocab] under greedy choice, and the smallest margin."""
        rows: list[np.ndarray] = []
        margin = np.inf
        for _ in range(NEW_TOKENS):
            rows.append(self.logits([*prompt, *(int(row.argmax()) for row in rows)])[-1])
            second, best = np.sort(rows[-1])[-2:]
            margin = min(margin, float(best - second))
        return np.stack(rows), margin


def rounding(wide: Oracle, narrow: Oracle, tokens: list[int], start: int) -> float:
    """How far the results of two number formats are apart at most, from a position on."""
    return float(np.abs(wide.logits(tokens) - narrow.logits(tokens))[start:].max())


def record(variant: str) -> dict[str, np.ndarray]:
    config, wide = VARIANTS[variant], variant in IN_FLOAT64
    oracle = Oracle(variant, torch.float64 if wide else torch.float32)
    narrow = Oracle(variant, torch.float32) if wide else None
    every = variant in ALL_LENGTHS
    lengths = [n for n in (LENGTHS if every else FEWER) if n + NEW_TOKENS <= oracle.length]
    everywhere = EVERYWHERE[: None if every else 1]
    vocab = config.get("text_config", config)["vocab_size"]
    out: dict[str, np.ndarray] = {
        "config": np.array(json.dumps(config)),
        "lengths": np.array(lengths, np.int32),
    }
    margins = []
    for i, length in enumerate(lengths):
        for attempt in range(100):  # until the continuation is clear
            noise = uniform(f"{variant}/prompt/{length}/{attempt}", length)
            prompt = [int(x) for x in (noise / np.sqrt(12.0) + 0.5) * vocab]
            logits, margin = oracle.continuation(prompt)
            tokens, start = [*prompt, *logits.argmax(1).tolist()], 0 if length in everywhere else length - 1
            if margin > MARGIN and (narrow is None or rounding(oracle, narrow, tokens, start) < ROUNDING):
                break
        else:
            raise SystemExit(f"{variant}: no prompt of {length} tokens has margins above {MARGIN}")
        margins.append(margin)
        out |= {
            f"prompt_{i}": np.array(prompt, np.int32),
            f"tokens_{i}": logits.argmax(1).astype(np.int32),
            f"logits_{i}": logits,
        }
        if length in everywhere:
            out[f"everywhere_{i}"] = oracle.logits(prompt)
    return {
        **out,
        "smallest_margin": np.array(min(margins)),
        "transformers": np.array(transformers.__version__),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    for name in sys.argv[1:] or VARIANTS:
        arrays = record(name)
        path = Path(__file__).parent / f"{name}.npz"
        np.savez_compressed(path, **arrays)
        distinct = len(
            np.unique(np.concatenate([a for key, a in arrays.items() if key.startswith("tokens_")]))
        )
        print(
            f"{name}: {path.stat().st_size} bytes, smallest margin {arrays['smallest_margin']:.4f},"
            f" {distinct} distinct tokens"
        )
