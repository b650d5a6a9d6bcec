"""What a small model makes of a JSON schema whose objects are closed, and of one whose objects are open.

    python -m benchmarks.schemas

SmolLM2-135M answers eight sentences with four seeds each. Counted are answers that are valid JSON with both
properties, those of them with other properties, and tokens. With `batch_invariant=True`, equal grammars give
equal answers.
"""

from __future__ import annotations

import json
from typing import Any

from benchmarks.machine import save
from jengine import LLM, SamplingParams
from tools.smollm2 import smollm2

SENTENCES = (
    "Ann is 31.",
    "Bob turned 45 last week.",
    "My name is Carla and I am 27 years old.",
    "Dave, 62, lives in Rome.",
    "Eve is nineteen.",
    "The winner was Frank (38).",
    "Gina celebrates her 50th birthday.",
    "Hugo is a boy of 9.",
)
SEEDS, TOKENS = 4, 120
PROPERTIES = {"name": {"type": "string"}, "age": {"type": "integer"}}
SCHEMA: dict[str, Any] = {"type": "object", "properties": PROPERTIES, "required": [*PROPERTIES]}
ARMS: dict[str, dict[str, Any]] = {
    "default": {"json": SCHEMA},
    "disable_additional_properties=False": {"json": SCHEMA, "disable_additional_properties": False},
    "additionalProperties: false": {"json": {**SCHEMA, "additionalProperties": False}},
    "additionalProperties: true": {"json": {**SCHEMA, "additionalProperties": True}},
}


def measure(llm: LLM, constraint: dict[str, Any]) -> dict[str, float]:
    params = [
        SamplingParams(temperature=0.7, max_tokens=TOKENS, seed=seed, structured_outputs=constraint)
        for _ in SENTENCES
        for seed in range(SEEDS)
    ]
    chats: Any = [[{"role": "user", "content": text}] for text in SENTENCES for _ in range(SEEDS)]
    answers = [output.outputs[0] for output in llm.chat(chats, params, use_tqdm=False)]
    objects = [value for answer in answers if (value := parsed(answer.text)) is not None]
    return {
        "answers": len(answers),
        "valid": len(objects),
        "with other properties": sum(value.keys() != PROPERTIES.keys() for value in objects),
        "mean tokens": round(sum(len(answer.token_ids) for answer in answers) / len(answers), 1),
    }


def parsed(text: str) -> dict[str, Any] | None:
    """The object, or None: the text is not complete."""
    try:
        value: dict[str, Any] = json.loads(text)
    except ValueError:
        return None
    return value


def main() -> None:
    with LLM(str(smollm2()), max_model_len=512, max_num_seqs=32, batch_invariant=True) as llm:
        results = {name: measure(llm, constraint) for name, constraint in ARMS.items()}
    for name, row in results.items():
        print(f"{name:36}" + "  ".join(f"{column} {value}" for column, value in row.items()))
    save("schemas", {"model": "SmolLM2-135M-Instruct, Q4_1", "arms": results})


if __name__ == "__main__":
    main()
