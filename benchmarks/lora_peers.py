"""What LoRA adapters cost vLLM: tokens a second with adapters over those of an engine without LoRA.

    python -m benchmarks.lora_peers [--model 134m] [--places 8] [--rounds 2] [--turns 2]

The requests and adapters are those of benchmarks.lora: 32 streams of 65 tokens, rank 16, every dense module.
Processes without and with LoRA take turns; a figure is the median over turns of the ratio of their tokens a
second.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from benchmarks.lora import PROMPT, RANK, ROWS, TOKENS, USED
from benchmarks.machine import made_model, save
from benchmarks.peers.separate import run_separate

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(folder: Path, config: dict[str, Any], seed: int) -> None:
    """A random adapter of a Llama model, as PEFT saves it."""
    rng, hidden, inner = np.random.default_rng(seed), config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = head * config["num_attention_heads"], head * config["num_key_value_heads"]
    shapes = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for module, (outs, inputs) in shapes.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            for side, shape in (("A", (RANK, inputs)), ("B", (outs, RANK))):
                tensors[f"{name}.lora_{side}.weight"] = rng.standard_normal(shape, np.float32) / 100
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    adapter = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": MODULES, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(adapter))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="134m")
    parser.add_argument("--places", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2, help="measured rounds of a process")
    parser.add_argument("--turns", type=int, default=2, help="processes of each")
    options = parser.parse_args()
    model = Path(made_model(options.model))
    config = json.loads((model / "config.json").read_text())
    rng = np.random.default_rng(0)
    task: dict[str, Any] = {
        "model": str(model),
        "rank": RANK,
        "rows": ROWS,
        "tokens": TOKENS,
        "rounds": options.rounds,
        "prompts": rng.integers(2, config["vocab_size"], (ROWS, PROMPT)).tolist(),
    }
    used = [0, *(count for count in USED if count <= options.places)]
    ratios: dict[int, list[float]] = {count: [] for count in used}
    without = []
    with tempfile.TemporaryDirectory() as parent:
        adapters = [Path(parent) / f"adapter-{number}" for number in range(options.places)]
        for number, folder in enumerate(adapters):
            write_adapter(folder, config, number)
        for _ in range(options.turns):
            plain = run_separate("vllm", "adapting", {**task, "adapters": [], "used": [0]})
            adapted = run_separate(
                "vllm", "adapting", {**task, "adapters": [*map(str, adapters)], "used": used}
            )
            without.append(statistics.median(plain["0"]))
            for count in used:
                ratios[count].append(statistics.median(adapted[str(count)]) / without[-1])
    rows = [
        {"adapters": count, "ratio": round(statistics.median(found), 3)} for count, found in ratios.items()
    ]
    print(f"vLLM without LoRA: {statistics.median(without):.0f} tokens/s")
    for row in rows:
        print(row)
    tokens_per_second = round(statistics.median(without), 1)
    save("lora_peers", {"model": options.model, "tokens_per_second_without": tokens_per_second, "vllm": rows})


if __name__ == "__main__":
    main()
