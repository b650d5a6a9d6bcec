"""Records what transformers makes of images, for the tiny models with a vision part: images_VARIANT.npz.

Run from the repository's root, in a Python with torch, transformers and Pillow: python -m
tests.golden.record_vision [VARIANT ...]

A file holds, for image i: `pixels_i` float32 [patches, features], and the encoder's result, `rows_i` float32
[rows, hidden * levels]; and for a prompt with all images between text: `tokens` int32[length], `positions`
int32[3, length] and `delta` of models with mrope, and `logprobs` float32[length, vocab]. fitted.npz holds
sizes of images that Qwen2-VL's processor was given, limits of pixels, and the sizes that it chose.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
    smart_resize,
)

from tests.golden.pictures import PICTURES, pictures, text
from tests.golden.weights import VARIANTS, uniform, write_model


def load(variant: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), variant)
        how = {"attn_implementation": "eager", "experts_implementation": "eager"}
        return transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, **how)


def of_qwen(variant: str) -> dict[str, np.ndarray]:
    model, config = load(variant), VARIANTS[variant]
    images = Qwen2VLImageProcessorPil(**PICTURES[variant].processor)(pictures(variant), return_tensors="pt")
    pixels, grids = images["pixel_values"], images["image_grid_thw"]
    ends = grids.prod(-1).cumsum(0).tolist()
    out: dict[str, np.ndarray] = {}
    tokens: list[int] = []
    texts = text(variant, len(grids))
    for i, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        found = model.model.visual(pixels[start:end], grids[i : i + 1])
        levels = [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]
        rows = torch.cat(levels, dim=-1)
        out |= {
            f"pixels_{i}": pixels[start:end].numpy(),
            f"rows_{i}": rows.numpy(),
        }
        tokens += [*texts[i], config["vision_start_token_id"], *[config["image_token_id"]] * len(rows)]
        tokens.append(config["vision_end_token_id"])
    ids = torch.tensor([[*tokens, *texts[-1]]])
    kinds = (ids == config["image_token_id"]).int()
    positions, delta = model.model.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=grids)
    logits = model(
        input_ids=ids, pixel_values=pixels, image_grid_thw=grids, mm_token_type_ids=kinds, use_cache=False
    ).logits[0]
    return {
        **out,
        "tokens": ids[0].numpy().astype(np.int32),
        "positions": positions[:, 0].numpy().astype(np.int32),
        "delta": delta.numpy().astype(np.int32)[0, 0],
        "logprobs": torch.log_softmax(logits.float(), dim=-1).numpy(),
    }


def of_gemma(variant: str) -> dict[str, np.ndarray]:
    model, config = load(variant), VARIANTS[variant]
    size, side = config["vision_config"]["patch_size"], config["vision_config"]["image_size"]
    processor = Gemma3ImageProcessorPil(**PICTURES[variant].processor)
    pixels = processor(pictures(variant), return_tensors="pt")["pixel_values"]
    out: dict[str, np.ndarray] = {}
    tokens: list[int] = []
    texts = text(variant, len(pixels))
    for i, image in enumerate(pixels):
        [rows] = model.model.get_image_features(image[None]).pooler_output
        cells = image.reshape(3, side // size, size, side // size, size).permute(1, 3, 0, 2, 4)
        out |= {f"pixels_{i}": cells.reshape(-1, 3 * size**2).numpy(), f"rows_{i}": rows.numpy()}
        # an empty line is token 0
        tokens += [*texts[i], 0, config["boi_token_index"], *[config["image_token_index"]] * len(rows)]
        tokens += [config["eoi_token_index"], 0]
    ids = torch.tensor([[*tokens, *texts[-1]]])
    kinds = (ids == config["image_token_index"]).int()
    logits = model(input_ids=ids, pixel_values=pixels, token_type_ids=kinds, use_cache=False).logits[0]
    return {
        **out,
        "tokens": ids[0].numpy().astype(np.int32),
        "logprobs": torch.log_softmax(logits.float(), dim=-1).numpy(),
    }


def of_gemma4(variant: str) -> dict[str, np.ndarray]:
    model, config = load(variant), VARIANTS[variant]
    processor = Gemma4ImageProcessorPil(**PICTURES[variant].processor)
    images = processor(pictures(variant), return_tensors="pt")
    pixels, places = images["pixel_values"], images["image_position_ids"]
    out: dict[str, np.ndarray] = {}
    tokens: list[int] = []
    texts = text(variant, len(pixels))
    features = model.model.get_image_features(pixels, places).pooler_output
    for i, rows in enumerate(features):
        real = (places[i] >= 0).all(-1)
        out |= {f"pixels_{i}": pixels[i][real].numpy(), f"rows_{i}": rows.numpy()}
        tokens += [*texts[i], config["boi_token_id"], *[config["image_token_id"]] * len(rows)]
        tokens.append(config["eoi_token_id"])
    ids = torch.tensor([[*tokens, *texts[-1]]])
    kinds = (ids == config["image_token_id"]).int()
    given = {"pixel_values": pixels, "image_position_ids": places, "mm_token_type_ids": kinds}
    logits = model(input_ids=ids, **given, use_cache=False).logits[0]
    return {
        **out,
        "tokens": ids[0].numpy().astype(np.int32),
        "logprobs": torch.log_softmax(logits.float(), dim=-1).numpy(),
    }


def fitted(count: int = 400) -> np.ndarray:
    """int32 [sizes, 6]: height, width, least and most pixels, and the new height and width, for multiples of
    28.
    """
    shares = uniform("fitted", count * 2).reshape(count, 2) / np.sqrt(12.0) + 0.5
    limits = ((3136, 1003520), (65536, 65536), (784, 12845056), (200704, 401408))
    out = []
    for i, share in enumerate(shares):
        height, width = (int(side) for side in 2.0 ** (share * 12))
        if max(height, width) <= 200 * min(height, width):
            least, most = limits[i % len(limits)]
            out.append([height, width, least, most, *smart_resize(height, width, 28, least, most)])
    return np.array(out, np.int32)


RECORDERS = {
    "qwen3_5": of_qwen,
    "qwen3_5_moe": of_qwen,
    "gemma3": of_gemma,
    "gemma4": of_gemma4,
    "qwen2_5_vl": of_qwen,
    "qwen3_vl": of_qwen,
    "qwen3_vl_moe": of_qwen,
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    np.savez_compressed(Path(__file__).parent / "fitted.npz", fitted=fitted())
    for name in sys.argv[1:] or PICTURES:
        with torch.no_grad():
            arrays = RECORDERS[VARIANTS[name]["model_type"]](name)
        path = Path(__file__).parent / f"images_{name}.npz"
        np.savez_compressed(path, transformers=np.array(transformers.__version__), **arrays)
        print(f"{name}: {path.stat().st_size} bytes, {len(arrays['tokens'])} tokens")
