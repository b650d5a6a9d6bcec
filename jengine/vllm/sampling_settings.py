"""vLLM's sampling parameters, and arguments of methods, that jengine does not have under this name."""

from __future__ import annotations

from jengine.vllm.setting import Setting, no_effect, renamed, unsupported

BEAMS = "BeamSearchParams do this: LLM.beam_search, AsyncLLM.generate, completions over gRPC and HTTP"
MASKS = "use logit_bias, allowed_token_ids, bad_words or structured_outputs"

SAMPLING: tuple[Setting, ...] = (
    renamed("guided_decoding", "structured_outputs"),
    no_effect("spaces_between_special_tokens", "the tokenizer decides about spaces", True),
    no_effect("skip_clone", "parameters are never changed", False, True),
    no_effect("stream_interval", "set stream_interval for the engine", 1),
    unsupported("flat_logprobs", "log probabilities are dicts by token id", False),
    unsupported("logits_processors", MASKS),
    unsupported(
        "logprob_token_ids", "logprobs returns the likeliest tokens; allowed_token_ids restricts the choice"
    ),
    unsupported("prompt_logprob_token_ids", "prompt_logprobs returns the likeliest tokens"),
    unsupported("prompt_logprob_start", "prompt_logprobs scores the whole prompt", 0),
    unsupported(
        "skip_reading_prefix_cache", "a request with another cache_salt finds no pages of others", False
    ),
    unsupported("repetition_detection", "use repetition_penalty or frequency_penalty"),
    unsupported("extra_args", "there are no plugins that would read them"),
    unsupported("best_of", "vLLM has removed it; n gives several completions", 1),
    unsupported("use_beam_search", BEAMS, False),
    unsupported("early_stopping", BEAMS, False),
    unsupported("length_penalty", BEAMS, 1.0),
    unsupported("truncate_prompt_tokens", "pass prompt_token_ids, cut to what you want"),
    unsupported("guided_json", 'structured_outputs={"json": ...} does this'),
    unsupported("guided_regex", 'structured_outputs={"regex": ...} does this'),
    unsupported("guided_choice", 'structured_outputs={"choice": ...} does this'),
    unsupported("guided_grammar", 'structured_outputs={"grammar": ...} does this'),
    unsupported("response_format", "structured_outputs does this"),
    unsupported("max_completion_tokens", "max_tokens does this"),
    unsupported("max_new_tokens", "max_tokens does this"),
)

STRUCTURED: tuple[Setting, ...] = (
    Setting(
        "json_object", "renamed", "", fits=(False,), gives={True: {"json": {"type": "object"}}}, switch=True
    ),
    no_effect("backend", "structured outputs always use llguidance", "auto", "guidance"),
    no_effect("disable_fallback", "there is one backend", False),
    unsupported("structural_tag", "use a grammar"),
)

CALLS: tuple[Setting, ...] = (  # of generate, chat, embed, score, ...
    unsupported("prompt_adapter_request", "prompt adapters are not supported"),
    unsupported("tokenization_kwargs", "pass prompt_token_ids, made as you want"),
    unsupported("truncate_prompt_tokens", "pass prompt_token_ids, cut to what you want"),
    unsupported(
        "chat_template_content_format", "the parts of a message are joined to text", "auto", "string"
    ),
    unsupported("pooling_params", "pass pooling, normalize and dimensions themselves"),
    unsupported("trace_headers", "spans are made by `jengine serve`; see otlp_traces_endpoint"),
    unsupported("data_parallel_rank", "run several engines", 0),
    no_effect("return_context_logits", "there are none", False),
    no_effect("encoding_format", "embeddings are numpy arrays", "float"),
)
