"""Constrains outputs to a choice, a regular expression and a JSON schema."""

import json

from jengine import LLM, SamplingParams
from jengine.sampling_params import StructuredOutputsParams

llm = LLM(
    model="demo",
    max_model_len=256,
    max_num_seqs=8,
    max_num_batched_tokens=128,
    guided_decoding_backend="auto",
)


def generate(constraint: StructuredOutputsParams, max_tokens: int = 40) -> str:
    sampling_params = SamplingParams(structured_outputs=constraint, temperature=0.0, max_tokens=max_tokens)
    return llm.generate("This library is", sampling_params, use_tqdm=False)[0].outputs[0].text


choice = generate(StructuredOutputsParams(choice=["good", "bad"]))
print("Choice:", choice in ("good", "bad"))
version = generate(StructuredOutputsParams(regex=r"v[0-9]\.[0-9]"))
print("Regex:", version[0], len(version))
schema = {
    "type": "object",
    "properties": {"age": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["age"],
    "additionalProperties": False,
}
print("JSON:", list(json.loads(generate(StructuredOutputsParams(json=schema), max_tokens=120))))
