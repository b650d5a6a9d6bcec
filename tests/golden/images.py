"""Images, texts and tokenizers of the tiny models that read images. Needs numpy, Pillow and tokenizers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from tests.golden.weights import uniform, write_model

SPECIAL = ["<image>", "<fake_token_around_image>", "<global-img>"]
SPECIAL += [f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)]
_SMOLVLM: dict[str, Any] = {
    "do_image_splitting": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "max_image_size": {"longest_edge": 24},
    "resample": 1,
    "size": {"longest_edge": 72},
}
PROCESSORS = {"smolvlm": _SMOLVLM, "idefics3": {**_SMOLVLM, "do_image_splitting": False}}
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}:{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


class Asked(NamedTuple):
    """A text with <image> for each image, and the sizes of the images."""

    text: str
    sizes: tuple[tuple[int, int], ...]  # width, height


# odd sizes and ratios, several in a prompt, at its beginning, its end and between text
CASES = (
    Asked("<image>What is it?", ((13, 57),)),
    Asked("A<image>and<image>differ", ((200, 31), (24, 24))),
    Asked("see: <image>", ((7, 5),)),
    Asked("<image><image>\n", ((61, 60), (9, 130))),
)


def picture(key: str, size: tuple[int, int]) -> Image.Image:
    """Coarse random shapes with noise, so that resizing and positions matter."""
    width, height = size
    coarse = uniform(f"{key}/coarse", 4 * 4 * 3).reshape(4, 4, 3)
    noise = uniform(f"{key}/noise", width * height * 3).reshape(height, width, 3)
    shapes = coarse[np.arange(height) * 4 // height][:, np.arange(width) * 4 // width]
    return Image.fromarray(np.clip(128 + 50 * shapes + 15 * noise, 0, 255).astype(np.uint8), "RGB")


def pictures(variant: str, case: int) -> list[Image.Image]:
    return [picture(f"{variant}/{case}/{i}", size) for i, size in enumerate(CASES[case].sizes)]


def write_image_model(folder: Path, variant: str, **changes: Any) -> None:
    """A folder in Hugging Face's layout, with a tokenizer of bytes and the special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    write_model(folder, variant, **changes)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    more = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(more))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[variant]))


def last_seen(tokens: list[int], rows: list[int]) -> np.ndarray:
    """For each token of a prompt, the index of the last token that it sees, where an image's tokens see each
    other: int32[tokens].

    Args:
        tokens: ids, with -1 at embedding rows; rows: of each image, in the order of the images.
    """
    out = np.arange(len(tokens), dtype=np.int32)
    visual, start = np.flatnonzero(np.asarray(tokens, np.int64) == -1), 0
    for count in rows:
        indices = visual[start : (start := start + count)]
        out[indices] = indices[-1]
    return out
