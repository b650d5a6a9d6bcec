"""What a request's random numbers come from."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence


def prompt_seed(seed: int, prompt_token_ids: Sequence[int]) -> int:
    """A 64-bit seed from a request's own, from -2**63 to 2**64 - 1, and its prompt.

    So one seeded SamplingParams gives different prompts different noise, and the same prompt always the same, wherever it stands
    among others. A seed and its value modulo 2**64 are one.
    """
    content = (seed % 2**64).to_bytes(8, "little") + array("i", prompt_token_ids).tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
