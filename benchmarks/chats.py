"""Chats whose answers `benchmarks.quantization` scores: SmolLM2-135M-Instruct's own, greedy and at float32,
to questions.txt.

    python -m benchmarks.chats

writes chats.json: token ids of each prompt and its answer.
"""

from __future__ import annotations

import json
from pathlib import Path

from jengine import LLM, SamplingParams
from tools.smollm2 import smollm2

QUESTIONS, CHATS = (Path(__file__).with_name(name) for name in ("questions.txt", "chats.json"))
LONGEST = 128  # tokens of an answer


def main() -> None:
    llm = LLM(
        str(smollm2()),
        dtype="float32",
        quantization="none",
        max_model_len=1024,
        max_num_seqs=8,
        tile_size=64,
        progress=False,
    )
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS.read_text().splitlines()]
    outputs = llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=LONGEST), use_tqdm=False)
    lines = [
        json.dumps({"prompt": output.prompt_token_ids, "answer": list(output.outputs[0].token_ids)})
        for output in outputs
    ]
    CHATS.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    print(sum(len(output.outputs[0].token_ids) for output in outputs), "tokens")


if __name__ == "__main__":
    main()
