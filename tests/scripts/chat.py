"""Answers conversations, with the template applied by hand and by the engine. Options are flags."""

from jengine import LLM, EngineArgs, TokensPrompt
from jengine.utils import FlexibleArgumentParser

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt"
    " %}assistant:{% endif %}"
)


def create_parser():
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(
        model="demo", max_num_seqs=8, max_num_batched_tokens=128, trust_remote_code=False, runner="auto"
    )
    sampling_group = parser.add_argument_group("Sampling parameters")
    sampling_group.add_argument("--max-tokens", type=int, default=8)
    sampling_group.add_argument("--temperature", type=float)
    parser.add_argument("--chat-template-path", type=str)
    return parser


def main(args):
    max_tokens = args.pop("max_tokens")
    temperature = args.pop("temperature")
    chat_template_path = args.pop("chat_template_path")
    llm = LLM(**args, chat_template=TEMPLATE)

    tokenizer = llm.get_tokenizer()
    sampling_params = llm.get_default_sampling_params().clone(
        max_tokens=max_tokens, stop_token_ids=[tokenizer.eos_token_id, *range(2000, 2400)]
    )
    if temperature is not None:
        sampling_params = sampling_params.clone(temperature=temperature)
    conversation = [
        {"role": "system", "content": "You write Python."},
        {"role": "user", "content": "Add two numbers."},
    ]
    prompt = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    print(prompt.splitlines()[-1])
    token_ids = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
    assert token_ids == tokenizer(prompt, add_special_tokens=False).input_ids
    [by_text] = llm.generate(
        [TokensPrompt(prompt_token_ids=token_ids)], sampling_params=sampling_params, use_tqdm=False
    )
    [by_chat] = llm.chat(
        conversation,
        sampling_params=sampling_params,
        use_tqdm=False,
        chat_template=chat_template_path,
        chat_template_content_format="auto",
        lora_request=None,
    )
    assert by_text.outputs[0].token_ids == by_chat.outputs[0].token_ids
    assert by_chat.prompt_token_ids == token_ids
    conversations = [conversation, conversation[1:]]
    batch = llm.chat(conversations, sampling_params, use_tqdm=False, add_generation_prompt=True)
    print("Answers:", len(batch), "Prompt tokens:", [len(output.prompt_token_ids) > 4 for output in batch])
    print(
        "Decoded:",
        tokenizer.decode(token_ids, skip_special_tokens=True) == prompt,
        tokenizer.batch_decode([token_ids]) == [prompt],
    )


if __name__ == "__main__":
    parser = create_parser()
    args: dict = vars(parser.parse_args(["--max_model_len", "256", "--temperature", "0"]))
    main(args)
