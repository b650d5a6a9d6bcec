"""Answers conversations, with the template applied by hand and by the engine."""

from jengine import LLM, SamplingParams, TokensPrompt

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt"
    " %}assistant:{% endif %}"
)
messages = [
    {"role": "system", "content": "You write Python."},
    {"role": "user", "content": "Add two numbers."},
]

llm = LLM(
    model="demo",
    chat_template=TEMPLATE,
    max_model_len=256,
    max_num_seqs=8,
    max_num_batched_tokens=128,
    trust_remote_code=False,
)
tokenizer = llm.get_tokenizer()
prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
print(prompt.splitlines()[-1])
token_ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
assert token_ids == tokenizer(prompt, add_special_tokens=False).input_ids
sampling_params = SamplingParams(
    temperature=0, max_tokens=8, stop_token_ids=[tokenizer.eos_token_id, *range(2000, 2400)]
)
[by_text] = llm.generate(
    [TokensPrompt(prompt_token_ids=token_ids)], sampling_params=sampling_params, use_tqdm=False
)
[by_chat] = llm.chat(
    messages,
    sampling_params=sampling_params,
    use_tqdm=False,
    chat_template_content_format="auto",
    lora_request=None,
)
assert by_text.outputs[0].token_ids == by_chat.outputs[0].token_ids
assert by_chat.prompt_token_ids == token_ids
batch = llm.chat([messages, messages[1:]], sampling_params, use_tqdm=False, add_generation_prompt=True)
print("Answers:", len(batch), "Prompt tokens:", [len(output.prompt_token_ids) > 4 for output in batch])
print(
    "Decoded:",
    tokenizer.decode(token_ids, skip_special_tokens=True) == prompt,
    tokenizer.batch_decode([token_ids]) == [prompt],
)
