"""Records beams over what transformers computes for some of the tiny models, in beams.json beside this
script.

Run from the repository's root, in any Python with torch and transformers: python -m tests.golden.record_beams
[VARIANT ...]

Of each variant and width there are three searches: one without an end-of-sequence token and with
length_penalty 0, which transformers' own beam search finds, too; one with such a token, and one with another
length_penalty. There, transformers drops what ends outside of the best beams of a step, which vLLM's rule
keeps; its own beams are recorded where they are the same. Beams are [tokens, log probability, ended].
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tests.golden.beam_rule import Found, beam_search
from tests.golden.record import Oracle
from tests.golden.weights import VARIANTS, uniform

FILE = Path(__file__).parent / "beams.json"
BEAM_VARIANTS = ("llama_gqa", "gemma2", "gpt2", "qwen3_untied", "mistral_window")
WIDTHS = (2, 4, 8)
STEPS, LENGTH = 12, 21
ATTEMPTS = 10  # of which the one with the largest margin is recorded
MARGIN = 2e-4  # between what is kept and what is not, for beams to be equal elsewhere


class Searches:
    """Beam searches of a variant."""

    def __init__(self, variant: str) -> None:
        self.variant, self.oracle = variant, Oracle(variant)
        self.vocab = VARIANTS[variant]["vocab_size"]

    def prompt(self, attempt: int) -> list[int]:
        noise = uniform(f"{self.variant}/beams/{attempt}", LENGTH)
        return [int(x) for x in (noise / np.sqrt(12.0) + 0.5) * self.vocab]

    def rule(self, prompt: list[int], width: int, **how: Any) -> tuple[list[Found], float]:
        """The beams that vLLM's rule chooses."""

        def candidates(beams: list[list[int]]) -> list[dict[int, float]]:
            with torch.no_grad():
                logits = self.oracle.model(torch.tensor(beams), use_cache=False).logits[:, -1]
            likely = torch.log_softmax(logits, -1).topk(2 * width)
            rows = zip(likely.indices.tolist(), likely.values.tolist(), strict=True)
            return [dict(zip(ids, values, strict=True)) for ids, values in rows]

        return beam_search(prompt, candidates, width=width, steps=STEPS, **how)

    def own(self, prompt: list[int], width: int, eos: int | None) -> list[list[Any]]:
        """The beams of transformers' own search, with length_penalty 0."""
        found = self.oracle.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            num_beams=width,
            num_return_sequences=width,
            do_sample=False,
            max_new_tokens=STEPS,
            length_penalty=0.0,
            early_stopping="never",
            eos_token_id=eos,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
        beams = []
        for tokens, score in zip(found.sequences[:, len(prompt) :].tolist(), found.sequences_scores.tolist()):  # noqa: B905
            ended = eos in tokens
            beams.append([tokens[: tokens.index(eos) + 1] if ended else tokens, score, ended])
        return beams

    def attempt(
        self, number: int, width: int, kind: int
    ) -> tuple[float, list[int], dict[str, Any], list[Found]] | None:
        """Margin, prompt, options, beams; None if an end-of-sequence token was wanted and no beam generated
        it.
        """
        prompt = self.prompt(number)
        how: dict[str, Any] = {"eos": None, "length_penalty": 2.0 if kind == 2 else 0.0}
        if kind:
            how["eos"] = self.rule(prompt, width, **how)[0][0].tokens[5]
        best, margin = self.rule(prompt, width, **how)
        return None if kind and not any(found.ended for found in best) else (margin, prompt, how, best)

    def record(self, width: int) -> list[dict[str, Any]]:
        searches = []
        for kind in range(3):
            tried = [self.attempt(10 * kind + i, width, kind) for i in range(ATTEMPTS)]
            margin, prompt, how, best = max((one for one in tried if one is not None), key=lambda one: one[0])
            assert margin > MARGIN, f"{self.variant}: no prompt for width {width} has a margin above {MARGIN}"
            own = None if kind == 2 else self.own(prompt, width, how["eos"])
            if own is not None and [tokens for tokens, _, _ in own] != [found.tokens for found in best]:
                print(f"{self.variant}, width {width}, eos {how['eos']}: transformers finds others")
                own = None
            searches.append(
                {
                    "prompt": prompt,
                    "width": width,
                    **how,
                    "beams": best,
                    "transformers": own,
                    "margin": margin,
                }
            )
        return searches


def main(variants: list[str]) -> None:
    recorded = json.loads(FILE.read_text()) if FILE.exists() else {}
    for variant in variants:
        searches = Searches(variant)
        recorded |= {
            variant: [one for width in WIDTHS for one in searches.record(width)],
            "versions": transformers.__version__,
        }
        lines = [
            json.dumps(name) + ": [\n" + ",\n".join(map(json.dumps, recorded[name])) + "\n]"
            for name in BEAM_VARIANTS
            if name in recorded
        ]
        FILE.write_text(
            "{\n" + ",\n".join(['"versions": ' + json.dumps(recorded["versions"]), *lines]) + "\n}\n"
        )
        print(f"{variant}: {FILE.stat().st_size} bytes")


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    main(sys.argv[1:] or [*BEAM_VARIANTS])
