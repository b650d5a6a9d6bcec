"""Dynamo's requests and answers, and jengine's. Plain data: imports nothing of Dynamo."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jengine import CompletionOutput, InvalidArgument, RequestOutput, SamplingParams, StructuredOutputs

SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "seed", "logit_bias", "include_stop_str_in_output",
)  # fmt: skip
STOPPING = ("max_tokens", "min_tokens", "ignore_eos")
STOP_IDS = ("stop_token_ids", "stop_token_ids_hidden")
SCORES = ("logprobs", "prompt_logprobs")
CONSTRAINTS = ("json", "regex", "choice", "grammar")
# what Dynamo's frontend does: it finds stop strings, and makes text of tokens
ELSEWHERE = {"stop", "skip_special_tokens", "formatted_prompt", "return_tokens_as_token_ids"}
# fields that are not supported, and the values that ask for nothing; a worker of Dynamo answers one choice
NEUTRAL = {"n": 1, "best_of": 1, "use_beam_search": False, "length_penalty": 1.0}
REASONS = {"abort": "cancelled"}
WITHOUT = ("prefill_result", "bootstrap_info", "multi_modal_data", "mm_processor_kwargs", "encoder_result")


def params_of(request: Mapping[str, Any], defaults: SamplingParams) -> SamplingParams:
    """Sampling parameters of a request; those that it does not set are the model's.

    Raises:
        InvalidArgument: naming a field that is invalid or not supported.
    """
    for name in WITHOUT:
        if request.get(name):
            raise InvalidArgument(name, type(request[name]).__name__, "must not be set: this worker has text")
    fields: dict[str, Any] = {"max_tokens": None, "detokenize": False}
    ids: list[int] = []
    for group, known in (
        ("sampling_options", SAMPLING),
        ("stop_conditions", STOPPING),
        ("output_options", SCORES),
    ):
        for name, value in (request.get(group) or {}).items():
            if value is None or name in ELSEWHERE:
                continue
            if name in known:
                fields[name] = value
            elif name in STOP_IDS:
                ids += value
            elif name == "guided_decoding":
                fields["structured_outputs"] = _structured(value)
            elif value != NEUTRAL.get(name):
                raise InvalidArgument(f"{group}.{name}", value, "is not supported by this worker")
    if ids:
        fields["stop_token_ids"] = sorted({*ids})
    return defaults.clone(**fields)


def _structured(guided: Mapping[str, Any]) -> StructuredOutputs:
    fields = {name: value for name, value in guided.items() if value is not None and name != "backend"}
    for name in fields:
        if name not in CONSTRAINTS:
            raise InvalidArgument(f"guided_decoding.{name}", fields[name], "is not supported by this worker")
    return StructuredOutputs(**fields)


def chunk(output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
    """A completion's new tokens; if it has ended, why, and how many tokens there were.

    Args:
        output: everything so far.
        completion: with the new tokens alone.
    """
    made: dict[str, Any] = {"token_ids": completion.token_ids, "index": completion.index}
    if completion.logprobs:
        entries = [*zip(completion.token_ids, completion.logprobs, strict=True)]
        made["log_probs"] = [position[token].logprob for token, position in entries]
        made["top_logprobs"] = [
            [
                {
                    "rank": entry.rank,
                    "token_id": other,
                    "token": entry.decoded_token,
                    "logprob": entry.logprob,
                }
                for other, entry in position.items()
            ]
            for _, position in entries
        ]
    if completion.finish_reason is not None:
        prompt, tokens = len(output.prompt_token_ids), len(output.outputs[completion.index].token_ids)
        made["finish_reason"] = REASONS.get(completion.finish_reason, completion.finish_reason)
        made["completion_usage"] = {
            "prompt_tokens": prompt,
            "completion_tokens": tokens,
            "total_tokens": prompt + tokens,
            "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens or 0},
        }
        if output.prompt_logprobs is not None:
            made["engine_data"] = {"prompt_logprobs": _prompt_scores(output)}
    return made


def _prompt_scores(output: RequestOutput) -> list[dict[str, dict[str, Any]] | None]:
    return [
        None
        if position is None
        else {
            str(token): {
                "logprob": entry.logprob,
                "rank": entry.rank,
                **({} if entry.decoded_token is None else {"decoded_token": entry.decoded_token}),
            }
            for token, entry in position.items()
        }
        for position in output.prompt_logprobs or ()
    ]
