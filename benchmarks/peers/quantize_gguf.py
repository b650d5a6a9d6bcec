"""Quantizes a GGUF file as llama.cpp's own command does: with Q4_0, the output head has six bits.

python -m benchmarks.peers.quantize_gguf FOLDER OUT Q4_0
"""

from __future__ import annotations

import sys
from pathlib import Path

import llama_cpp


def quantize(folder: Path, out: Path, kind: str) -> None:
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    files = [str(place / "model.gguf").encode() for place in (folder, out)]
    if llama_cpp.llama_model_quantize(*files, params):
        raise RuntimeError(f"{files[0].decode()} could not be quantized")


if __name__ == "__main__":
    quantize(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
