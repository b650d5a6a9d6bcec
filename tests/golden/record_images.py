"""Records what transformers computes for the tiny models that read images, one file a variant, beside this
script.

Run from the repository's root, in a Python with torch, transformers and Pillow: python -m
tests.golden.record_images

A file holds, for case i of images.CASES: `text_i`, its text; `prompt_i` int32[length], the prompt; `pixels_i`
uint8[frames, 3, height, width], the processor's pixels before they are normalized; `tokens_i` int32[24], the
greedy continuation; and `logits_i` float32[24, vocab].
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from tests.golden.images import CASES, PROCESSORS, pictures, write_image_model
from tests.golden.record import MARGIN, NEW_TOKENS

MARK = "\0"  # stands for <image> where that is not to be replaced
ENDINGS = ("", *"abcdefghijklmnopqrstuvwxyz")
MARKS = ("<fake_token_around_image>", "<image>", "<global-img>")


def record(variant: str) -> dict[str, np.ndarray]:
    out: dict[str, np.ndarray] = {"transformers": np.array(transformers.__version__)}
    with tempfile.TemporaryDirectory() as folder:
        write_image_model(Path(folder), variant)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        kind = {"smolvlm": SmolVLMImageProcessorPil, "idefics3": Idefics3ImageProcessorPil}[variant]
        processor = kind(**PROCESSORS[variant], return_row_col_info=True)
        model = transformers.AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        vision = model.config.vision_config
        each = (vision.image_size // vision.patch_size // model.config.scale_factor) ** 2
        for case, asked in enumerate(CASES):
            seen = processor(pictures(variant, case), return_tensors="np")
            names = [
                get_image_prompt_string(rows, columns, each, *MARKS).replace("<image>", MARK)
                for rows, columns in zip(seen["rows"][0], seen["cols"][0], strict=True)
            ]
            images = {
                "pixel_values": torch.tensor(seen["pixel_values"]),
                "pixel_attention_mask": torch.tensor(seen["pixel_attention_mask"]),
            }
            for ending in ENDINGS:  # until the continuation is clear, and without the token of images
                text = whole = asked.text + ending
                for name in names:
                    whole = whole.replace("<image>", name, 1)
                prompt = tokenizer(whole.replace(MARK, "<image>"))["input_ids"]
                logits = continuation(model, prompt, images)
                second, best = np.sort(logits, axis=1)[:, -2:].T
                if (best - second).min() > MARGIN and len(logits) == NEW_TOKENS:
                    break
            else:
                raise SystemExit(f"{variant} {case}: no ending gives a clear continuation")
            print(f"{variant} {case}: {len(prompt)} tokens, smallest margin {(best - second).min():.4f}")
            pixels = np.round((seen["pixel_values"][0] * 0.5 + 0.5) * 255).astype(np.uint8)
            out |= {
                f"text_{case}": np.array(text),
                f"prompt_{case}": np.array(prompt, np.int32),
                f"pixels_{case}": pixels,
                f"tokens_{case}": logits.argmax(1).astype(np.int32),
                f"logits_{case}": logits,
            }
    return out


def continuation(model: torch.nn.Module, prompt: list[int], images: dict[str, torch.Tensor]) -> np.ndarray:
    """float32 [NEW_TOKENS, vocab] under greedy choice; fewer if that chooses the token of images."""
    rows: list[np.ndarray] = []
    for _ in range(NEW_TOKENS):
        ids = [*prompt, *(int(row.argmax()) for row in rows)]
        if model.config.image_token_id in ids[len(prompt) :]:
            break
        with torch.no_grad():
            found = model(input_ids=torch.tensor([ids]), use_cache=False, **images).logits[0, -1]
        rows.append(found.float().numpy())
    return np.stack(rows)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:] or PROCESSORS:
        arrays = record(name)
        path = Path(__file__).parent / f"{name}_with_images.npz"
        np.savez_compressed(path, **arrays)
        print(f"{name}: {path.stat().st_size} bytes")
