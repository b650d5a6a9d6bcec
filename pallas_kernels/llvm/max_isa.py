"""The newest instructions that this process may use on x86: XLA's flag --xla_cpu_max_isa, which the kernels
for CPUs follow too. So a newer processor compiles and tests what an older one runs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

# XLA's values, the oldest first, each with the beginnings of the names of features that came after it
NEWER = {
    "SSE4_2": ("avx", "f16c", "fma", "vaes", "vpclmulqdq"),
    "AVX": ("avx2",),
    "AVX2": ("avx512", "avx10", "avx_vnni", "avxvnni", "evex512"),
    "AVX512": ("avx512_vnni", "avx512vnni"),
    "AVX512_VNNI": ("avx512_bf16", "avx512bf16"),
    "AVX512_BF16": ("amx",),
    "AMX": ("amx_fp16", "amx-fp16"),
}


def limit() -> str | None:
    """The flag's value in XLA_FLAGS, if it is one that XLA knows."""
    values = re.findall(r"--xla_cpu_max_isa=(\w+)", os.environ.get("XLA_FLAGS", ""))
    return values[-1].upper() if values and values[-1].upper() in NEWER else None


def hidden(features: Iterable[str]) -> set[str]:
    """Which of these features, by LLVM's or Linux's names, that XLA_FLAGS excludes."""
    newest, levels = limit(), [*NEWER]
    if newest is None:
        return set()
    newer = tuple(name for level in levels[levels.index(newest) :] for name in NEWER[level])
    return {feature for feature in features if feature.startswith(newer)}
