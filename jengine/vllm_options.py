"""Engine options of vLLM that change nothing here, so that scripts need not be edited."""

from __future__ import annotations

import warnings
from typing import Any

from jengine.errors import InvalidArgument

NO_EFFECT: dict[str, tuple[tuple[object, ...], str]] = {  # values without effect, and the reason
    "cpu_offload_gb": ((0,), "weights are not offloaded"),
    "disable_log_stats": ((True, False), "no statistics are logged; see LLM.stats"),
    "enforce_eager": ((False, True), "programs are always compiled, before the first request"),
    "load_format": (("auto", "safetensors"), "weights are read from safetensors, or from a converted folder"),
    "prefix_caching_hash_algo": (
        ("builtin", "sha256", "sha256_cbor", "xxhash", "xxhash_cbor"),
        "cached pages are found by their tokens themselves, see enable_prefix_caching",
    ),
    "skip_tokenizer_init": ((False,), "the tokenizer is always loaded"),
    "tokenizer_mode": (("auto",), "the tokenizer is the folder's tokenizer.json"),
    "trust_remote_code": ((False,), "code that comes with a model is never run; model families are part of jengine"),
}


def without_no_ops(options: dict[str, Any]) -> dict[str, Any]:
    """The options without those that have no effect.

    Raises:
        InvalidArgument: an option has another value.
    """
    left = {}
    for name, value in options.items():
        if name not in NO_EFFECT:
            left[name] = value
            continue
        values, reason = NO_EFFECT[name]
        if value not in values:
            raise InvalidArgument(name, value, f"must be {' or '.join(map(repr, values))}: {reason}")
        if name == "enforce_eager" and value:
            warnings.warn(f"{name}={value!r} has no effect: {reason}", stacklevel=4)
    return left
