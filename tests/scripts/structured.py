"""Constrains outputs to a choice, a regular expression, a JSON schema and a grammar."""

import json

from jengine import LLM, SamplingParams
from jengine.sampling_params import StructuredOutputsParams

sampling_params_choice = SamplingParams(
    structured_outputs=StructuredOutputsParams(choice=["good", "bad"]), temperature=0.0
)
sampling_params_regex = SamplingParams(
    structured_outputs=StructuredOutputsParams(regex=r"v[0-9]\.[0-9]\n"), stop=["\n"], max_tokens=50
)
json_schema = {
    "type": "object",
    "properties": {"age": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["age"],
}
sampling_params_json = SamplingParams(
    structured_outputs=StructuredOutputsParams(json=json_schema), temperature=0.0, max_tokens=120
)
simplified_sql_grammar = """
root ::= select_statement
select_statement ::= "SELECT " column " from " table " where " condition
column ::= "col_1 " | "col_2 "
table ::= "table_1 " | "table_2 "
condition ::= column "= " number
number ::= "1 " | "2 "
"""
sampling_params_grammar = SamplingParams(
    structured_outputs=StructuredOutputsParams(grammar=simplified_sql_grammar), max_tokens=60
)


def generate_output(prompt: str, sampling_params: SamplingParams, llm: LLM):
    outputs = llm.generate(prompt, sampling_params=sampling_params, use_tqdm=False)
    return outputs[0].outputs[0].text


def main():
    llm = LLM(
        model="demo",
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=128,
        guided_decoding_backend="auto",
    )
    choice_output = generate_output("This library is", sampling_params_choice, llm)
    print("Choice:", choice_output in ("good", "bad"))
    regex_output = generate_output("Its version is", sampling_params_regex, llm)
    print("Regex:", regex_output[0], len(regex_output))
    json_output = generate_output("Its age is", sampling_params_json, llm)
    print("JSON:", list(json.loads(json_output)))
    grammar_output = generate_output("A query:", sampling_params_grammar, llm)
    print("Grammar:", grammar_output.split()[0], len(grammar_output.split()))


if __name__ == "__main__":
    main()
