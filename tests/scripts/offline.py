"""Completes a list of prompts."""

from jengine import LLM, SamplingParams

prompts = ["def fibonacci(n):", "import os\n", "class Stack:"]
sampling_params = SamplingParams(
    temperature=0.8, top_p=0.95, max_tokens=8, seed=1, spaces_between_special_tokens=True
)


def main():
    llm = LLM(
        model="demo",
        tokenizer_mode="auto",
        dtype="float",
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=128,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        enable_chunked_prefill=True,
        distributed_executor_backend="mp",
        load_format="auto",
        block_size=16,
    )
    outputs = llm.generate(prompts, sampling_params, use_tqdm=False, lora_request=None, priority=None)
    for output in outputs:
        completion = output.outputs[0]
        print(
            f"Prompt: {output.prompt!r}, tokens: {len(completion.token_ids)}, reason:"
            f" {completion.finish_reason}"
        )
    params = llm.get_default_sampling_params()
    params = params.clone(max_tokens=4)
    print(
        "Tokens:",
        len(
            llm.generate({"prompt_token_ids": outputs[0].prompt_token_ids}, params, use_tqdm=False)[0]
            .outputs[0]
            .token_ids
        ),
    )


if __name__ == "__main__":
    main()
