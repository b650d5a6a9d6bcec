"""Sixteen conversations, and greedy answers of SmolLM2-135M-Instruct to them as transformers computes them at
float32.

Record again, in an environment with torch, transformers, accelerate and gguf: python -m tests.golden.smollm2
FILE.gguf
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ANSWERS = Path(__file__).parent / "smollm2.json"  # for each chat: prompt and answer as token ids
NEW_TOKENS = 32
QUESTIONS = (
    "What is the capital of France?", "Write a haiku about the sea.",
    "Explain why the sky is blue, in two sentences.", "How do I boil an egg?", "Name three kinds of fruit.",
    "Translate 'good morning' into Spanish.", "What does a compiler do?",
    "Tell me a short story about a fox and a crow.", "Why do leaves change color in autumn?",
    "Give me a recipe for pancakes.", "Who wrote Romeo and Juliet?",
    "Summarize: The train was late because snow had covered the tracks, and nobody had cleared them.",
    "Is a whale a fish? Answer yes or no, and say why.", "Write a Python function that adds two numbers.",
)  # fmt: skip
CHATS: list[list[dict[str, str]]] = [
    *([{"role": "user", "content": question}] for question in QUESTIONS),
    [
        {"role": "system", "content": "You answer like a pirate."},
        {"role": "user", "content": "Where is the treasure?"},
    ],
    [
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Nice to meet you, Ada!"},
        {"role": "user", "content": "What is my name?"},
    ],
]


def record(file: Path) -> list[dict[str, Any]]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    out = []
    for chat in CHATS:
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        prompt = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        with torch.no_grad():
            answer = model.generate(
                **prompt, max_new_tokens=NEW_TOKENS, do_sample=False, temperature=None, top_p=None, top_k=None
            )
        ids = prompt["input_ids"][0].tolist()
        out.append({"prompt": ids, "answer": answer[0, len(ids) :].tolist()})
    return out


if __name__ == "__main__":
    lines = ",\n".join(json.dumps(answer) for answer in record(Path(sys.argv[1])))
    ANSWERS.write_text(f"[\n{lines}\n]\n")
