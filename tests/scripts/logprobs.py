"""Scores texts by the log probabilities of their tokens, and embeds them."""

import math

from jengine import LLM, SamplingParams

llm = LLM(
    model="demo",
    task="embed",
    max_model_len=256,
    max_num_seqs=8,
    max_num_batched_tokens=128,
    max_logprobs=20,
    seed=0,
)
sampling_params = SamplingParams(temperature=0, max_tokens=3, logprobs=5, prompt_logprobs=1, detokenize=True)
texts = ["def main():", "x"]
for output in llm.generate(texts, sampling_params, use_tqdm=False):
    scores = [next(iter(entry.values())).logprob for entry in output.prompt_logprobs[1:]]
    print(
        "Prompt:",
        output.prompt_logprobs[0],
        len(scores) == len(output.prompt_token_ids) - 1,
        "Mean finite:",
        math.isfinite(sum(scores)),
    )
    print(
        "Tokens:",
        [len(entry) >= 5 for entry in output.outputs[0].logprobs],
        output.outputs[0].cumulative_logprob <= 0,
    )
one = llm.generate({"prompt_token_ids": [5]}, sampling_params, use_tqdm=False)[0]
print("One token:", one.prompt_logprobs)
for output in llm.embed(texts, use_tqdm=False, lora_request=None):
    embedding = output.outputs.embedding
    print("Embedding:", len(embedding) > 8, round(sum(x * x for x in embedding), 3))
