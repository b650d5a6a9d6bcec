"""Drafts tokens from the prompt, and reads from the metrics how many were accepted."""

from jengine import LLM, SamplingParams
from jengine.inputs import TokensPrompt
from jengine.utils.argparse_utils import FlexibleArgumentParser
from jengine.v1.metrics.reader import Counter, Gauge, Histogram, Vector


def parse_args():
    parser = FlexibleArgumentParser()
    parser.add_argument("--method", type=str, default="ngram", choices=["ngram", "eagle3", "mtp"])
    parser.add_argument("--num-spec-tokens", type=int, default=2)
    parser.add_argument("--prompt-lookup-max", type=int, default=5)
    parser.add_argument("--prompt-lookup-min", type=int, default=2)
    parser.add_argument("--enable-chunked-prefill", action="store_true")
    parser.add_argument("--print-output", action="store_true")
    return parser.parse_args()


def main(args):
    speculative_config = {
        "method": args.method,
        "num_speculative_tokens": args.num_spec_tokens,
        "prompt_lookup_max": args.prompt_lookup_max,
        "prompt_lookup_min": args.prompt_lookup_min,
    }
    llm = LLM(
        model="demo",
        tensor_parallel_size=1,
        gpu_memory_utilization=0.9,
        speculative_config=speculative_config,
        disable_log_stats=False,
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=128,
    )
    tokenizer = llm.get_tokenizer()
    prompt_ids = tokenizer.encode("x = 1\n" * 20, add_special_tokens=False)
    prompts = [TokensPrompt(prompt_token_ids=prompt_ids)]
    sampling_params = SamplingParams(temperature=0, max_tokens=64)
    outputs = llm.generate(prompts, sampling_params=sampling_params, use_tqdm=False)
    if args.print_output:
        print(outputs[0].outputs[0].text)

    num_drafts = num_draft_tokens = num_accepted_tokens = 0
    acceptance_counts = [0] * args.num_spec_tokens
    metrics = llm.get_metrics()
    for metric in metrics:
        if metric.name == "vllm:spec_decode_num_drafts":
            assert isinstance(metric, Counter)
            num_drafts += metric.value
        elif metric.name == "vllm:spec_decode_num_draft_tokens":
            assert isinstance(metric, Counter)
            num_draft_tokens += metric.value
        elif metric.name == "vllm:spec_decode_num_accepted_tokens":
            assert isinstance(metric, Counter)
            num_accepted_tokens += metric.value
        elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            assert isinstance(metric, Vector)
            for pos in range(len(metric.values)):
                acceptance_counts[pos] += metric.values[pos]
        elif isinstance(metric, Gauge) and metric.name == "vllm:num_requests_running":
            print("Running:", metric.value, metric.labels)
        elif isinstance(metric, Histogram):
            print("Steps:", metric.count > 0, metric.buckets["+Inf"] == metric.count)
    # how many drafts a step verifies depends on what steps cost on this machine
    print("Drafts:", 0 <= num_accepted_tokens <= num_draft_tokens, num_drafts <= num_draft_tokens)
    print("By position:", sum(acceptance_counts) == num_accepted_tokens)
    return 1 + num_accepted_tokens / num_drafts if num_drafts > 0 else 1


if __name__ == "__main__":
    args = parse_args()
    acceptance_length = main(args)
