"""vLLM without or with LoRA adapters, in a separate process under its own Python; see lora_peers.py.

A task in JSON on standard input names the model, folders of adapters (none: LoRA is off), and how many of
them requests use, in turn. The first round warms up and is not measured.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    import vllm
    from vllm.lora.request import LoRARequest

    task: dict[str, Any] = json.load(sys.stdin)
    adapters = [
        LoRARequest(Path(folder).name, number, folder) for number, folder in enumerate(task["adapters"], 1)
    ]
    lora = {"enable_lora": True, "max_loras": len(adapters), "max_lora_rank": task["rank"]}
    llm = vllm.LLM(
        task["model"],
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=task["rows"],
        enable_prefix_caching=False,
        **(lora if adapters else {}),
    )
    params = vllm.SamplingParams(
        temperature=0.0, max_tokens=task["tokens"], ignore_eos=True, detokenize=False
    )
    prompts = [vllm.TokensPrompt(prompt_token_ids=prompt) for prompt in task["prompts"]]
    rates: dict[int, list[float]] = {used: [] for used in task["used"]}
    for number in range(task["rounds"] + 1):
        for used, found in rates.items():
            chosen = [adapters[row % used] for row in range(len(prompts))] if used else None
            begun = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False, lora_request=chosen)
            if number:
                found.append(len(prompts) * task["tokens"] / (time.perf_counter() - begun))
    Path(task["result"]).write_text(json.dumps(rates))


if __name__ == "__main__":
    main()
