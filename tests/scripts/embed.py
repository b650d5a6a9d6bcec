"""Embeds texts. Options are flags."""

from argparse import Namespace

from jengine import LLM, EngineArgs
from jengine.utils import FlexibleArgumentParser


def parse_args():
    parser = FlexibleArgumentParser()
    parser = EngineArgs.add_cli_args(parser)
    parser.set_defaults(
        model="demo",
        runner="pooling",
        enforce_eager=False,
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=128,
    )
    return parser.parse_args()


def main(args: Namespace):
    prompts = ["def main():", "The capital of France is"]
    llm = LLM(**vars(args))
    outputs = llm.embed(prompts, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        embeds = output.outputs.embedding
        length = sum(x * x for x in embeds)
        print(f"Prompt: {prompt!r}, size: {len(embeds)}, length: {length:.3f}")


if __name__ == "__main__":
    args = parse_args()
    main(args)
