"""Writes tests/data/pytorch: a file as torch.save writes it, and its tensors as safetensors has them. Under
PyTorch: `make goldens`.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import torch
from safetensors.torch import save_file

FOLDER = Path(__file__).parent.parent / "data" / "pytorch"


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    plain = torch.randn(3, 5, generator=generator)
    tensors: dict[str, torch.Tensor] = OrderedDict(
        float32=plain,
        float16=plain.half(),
        bfloat16=plain.bfloat16(),
        float64=plain.double(),
        ids=torch.arange(6),
        transposed=plain.t(),
        part=plain[1:, ::2],
        tied=plain,
        parameter=torch.nn.Parameter(plain + 1),
        number=torch.tensor(2.5),
        empty=torch.empty(0, 4),
    )
    FOLDER.mkdir(parents=True, exist_ok=True)
    torch.save(tensors, FOLDER / "pytorch_model.bin")
    torch.save(tensors, FOLDER / "before_1_6.bin", _use_new_zipfile_serialization=False)
    save_file(
        {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()},
        FOLDER / "expected.safetensors",
    )


if __name__ == "__main__":
    main()
