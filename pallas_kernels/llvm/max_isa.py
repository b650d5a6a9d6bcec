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


def hidden(features: Iterable[str]) -> set[str]:
    """Which of these features, by LLVM's or Linux's names, that XLA_FLAGS excludes."""
    values = re.findall(r"--xla_cpu_max_isa=(\w+)", os.environ.get("XLA_FLAGS", ""))
    levels = [*NEWER]
    if not values or values[-1].upper() not in levels:  # XLA rejects a value that it does not know
        return set()
    newer = tuple(name for level in levels[levels.index(values[-1].upper()) :] for name in NEWER[level])
    return {feature for feature in features if feature.startswith(newer)}
