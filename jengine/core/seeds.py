"""Seeds of requests' random numbers."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence


def prompt_seed(seed: int, prompt_token_ids: Sequence[int]) -> int:
    """Derives a 64-bit seed from a request's own seed, from -2**63 to 2**64 - 1, and its prompt.

    So with one seeded SamplingParams, different prompts get different noise, and equal prompts the same,
    wherever they are in a list. A seed is equivalent to its value modulo 2**64.
    """
    content = (seed % 2**64).to_bytes(8, "little") + array("i", prompt_token_ids).tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
