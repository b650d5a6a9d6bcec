"""Serves requests with and without adapters in the same batches, stepping the engine by hand. The arguments
are the folders of two adapters.
"""

import sys

from jengine import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from jengine.lora.request import LoRARequest


def create_test_prompts(first: str, second: str) -> list[tuple[str, SamplingParams, LoRARequest | None]]:
    greedy = SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1, max_tokens=12)
    return [
        ("def main():", greedy, None),
        ("def main():", greedy, LoRARequest("first", 1, first)),
        ("def main():", greedy, LoRARequest("second", 2, second)),
        ("import os", SamplingParams(n=2, temperature=0.8, top_k=5, max_tokens=8), None),
    ]


def process_requests(
    engine: LLMEngine, test_prompts: list[tuple[str, SamplingParams, LoRARequest | None]]
) -> dict[str, RequestOutput]:
    request_id, finished = 0, {}
    while test_prompts or engine.has_unfinished_requests():
        if test_prompts:
            prompt, sampling_params, lora_request = test_prompts.pop(0)
            engine.add_request(str(request_id), prompt, sampling_params, lora_request=lora_request)
            request_id += 1
        request_outputs: list[RequestOutput] = engine.step()
        for request_output in request_outputs:
            if request_output.finished:
                finished[request_output.request_id] = request_output
    return finished


def initialize_engine() -> LLMEngine:
    engine_args = EngineArgs(
        model="demo",
        enable_lora=True,
        max_loras=2,
        max_lora_rank=8,
        max_cpu_loras=2,
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=128,
    )
    return LLMEngine.from_engine_args(engine_args)


def main(first: str, second: str):
    engine = initialize_engine()
    outputs = process_requests(engine, create_test_prompts(first, second))
    print("Finished:", sorted(outputs))
    texts = [outputs[request_id].outputs[0].text for request_id in "012"]
    print("Different texts:", len(set(texts)), "Completions:", len(outputs["3"].outputs))
    engine.add_request("aborted", "import os", SamplingParams(max_tokens=100))
    engine.abort_request(["aborted"])
    print("Unfinished:", engine.has_unfinished_requests(), engine.step())


if __name__ == "__main__":
    main(*sys.argv[1:])
