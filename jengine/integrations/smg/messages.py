"""Converts between the messages of smg's worker service and jengine's plain data. Needs the extra smg."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from jengine import (
    CompletionOutput,
    InvalidArgument,
    Load,
    Logprob,
    RequestOutput,
    SamplingParams,
    StructuredOutputs,
)
from jengine.serving.calls.portions import Portions, width_of
from jengine.serving.processes.engines import changed_fields
from jengine.spi import check_entries

Positions = Sequence[Mapping[int, Logprob] | None]

# fields of a request that mean something that a worker would have to do, and that this one cannot
REFUSED = {
    "kv_transfer_params": "only requests over HTTP can name another server's pages",
    "kv_transfer_params_json": "only requests over HTTP can name another server's pages",
    "mm_inputs": "images are processed by this server; requests over HTTP have them",
    "extra_mm_inputs": "images are processed by this server; requests over HTTP have them",
    "media_refs": "no addresses or files are opened for clients; requests over HTTP have images",
}
ALIKE = (  # fields whose unset value is that of SamplingParams
    "min_p", "frequency_penalty", "presence_penalty", "min_tokens", "ignore_eos",
    "include_stop_str_in_output", "skip_special_tokens", "top_k",
)  # fmt: skip
ONE = ("top_p", "repetition_penalty", "n")  # an unset field has 0, which stands for 1
OPTIONAL = ("max_tokens", "logprobs", "prompt_logprobs", "seed")


def check_fields(request: pb.GenerateRequest) -> None:
    """Raises InvalidArgument for fields that this worker cannot serve."""
    for field, value in request.ListFields():
        if field.name in REFUSED:
            raise InvalidArgument(field.name, type(value).__name__, f"must not be set: {REFUSED[field.name]}")
    if request.data_parallel_rank:
        raise InvalidArgument("data_parallel_rank", request.data_parallel_rank, "must be 0: there is one")


def to_params(proto: pb.SamplingParams) -> SamplingParams:
    """Sampling parameters; unset fields have vLLM's defaults, since the gateway adds those of the model.

    `spaces_between_special_tokens` and `grammar_from_first_token` change nothing: no text is sent, and
    grammars always apply from the first token on.

    Raises:
        InvalidArgument: naming the field.
    """
    for name in ("stop", "stop_token_ids", "logit_bias"):
        check_entries(name, len(getattr(proto, name)))  # before they are copied
    fields: dict[str, Any] = {name: getattr(proto, name) for name in ALIKE}
    fields |= {name: getattr(proto, name) or 1 for name in ONE}
    fields |= {name: getattr(proto, name) if proto.HasField(name) else None for name in OPTIONAL}
    return SamplingParams(
        temperature=proto.temperature if proto.HasField("temperature") else 1.0,
        stop=list(proto.stop),
        stop_token_ids=list(proto.stop_token_ids),
        logit_bias=dict(proto.logit_bias) or None,
        structured_outputs=_structured(proto),
        detokenize=bool(proto.stop),
        **fields,
    )


def _structured(proto: pb.SamplingParams) -> StructuredOutputs | None:
    kind = proto.WhichOneof("constraint")
    if kind is None or (kind == "json_object" and not proto.json_object):
        return None
    if kind == "json_schema":
        return StructuredOutputs(json=proto.json_schema)
    if kind == "json_object":
        return StructuredOutputs(json={"type": "object"})
    if kind == "choice":
        check_entries("structured_outputs.choice", len(proto.choice.choices))
        return StructuredOutputs(choice=list(proto.choice.choices))
    if kind in ("regex", "grammar"):
        return StructuredOutputs(**{kind: getattr(proto, kind)})
    raise InvalidArgument(
        f"structured_outputs.{kind}", getattr(proto, kind), "must not be set: not supported"
    )


def truncated(ids: list[int], params: pb.SamplingParams, max_model_len: int) -> list[int]:
    """The last ids of a prompt, as `truncate_prompt_tokens` says; -1: as many as the model takes.

    Raises:
        InvalidArgument: it is neither -1 nor positive.
    """
    if not params.HasField("truncate_prompt_tokens"):
        return ids
    length: int = params.truncate_prompt_tokens
    if length == -1:
        length = max_model_len - 1
    if length < 1:
        raise InvalidArgument("truncate_prompt_tokens", length, "must be -1 or at least 1")
    return ids[-length:]


# --- answers ----------------------------------------------------------------------------------------


def counts(output: RequestOutput, tokens: int) -> dict[str, int]:
    """Numbers of tokens. tokens: generated."""
    cached = output.num_cached_tokens or 0
    return {
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": tokens,
        "cached_tokens": cached,
    }


def chunk(
    output: RequestOutput,
    completion: CompletionOutput,
    part: slice,
    top: int | None,
    prompt: pb.InputLogProbs | None,
) -> pb.GenerateResponse:
    """New tokens of a completion. top: number of log probabilities of each."""
    ids = completion.token_ids[part]
    message = pb.GenerateStreamChunk(token_ids=ids, index=completion.index, **counts(output, len(ids)))
    if completion.logprobs is not None:
        _add_scores(message.output_logprobs, ids, completion.logprobs[part], top)
    if prompt is not None:
        message.input_logprobs.CopyFrom(prompt)
    return pb.GenerateResponse(chunk=message)


def complete(output: RequestOutput, completion: CompletionOutput) -> pb.GenerateComplete:
    """A finished completion, with all of its tokens and without log probabilities."""
    message = pb.GenerateComplete(
        output_ids=completion.token_ids,
        finish_reason=completion.finish_reason,
        index=completion.index,
        **counts(output, len(completion.token_ids)),
    )
    if completion.finish_reason == "stop" and isinstance(completion.stop_reason, str):
        message.matched_stop_str = completion.stop_reason
    elif completion.finish_reason == "stop" and completion.stop_reason is not None:
        message.matched_token_id = completion.stop_reason
    return message


async def add_scores(
    to: pb.OutputLogProbs | pb.InputLogProbs,
    ids: Sequence[int],
    positions: Positions,
    top: int | None,
    portions: Portions,
) -> None:
    """Adds log probabilities in portions, so that other requests run in between."""
    done = 0
    async for part in portions.slices(positions, width_of(positions)):
        _add_scores(to, ids[done : done + len(part)], part, top)
        done += len(part)


def _add_scores(
    to: pb.OutputLogProbs | pb.InputLogProbs, ids: Sequence[int], positions: Positions, top: int | None
) -> None:
    for token, position in zip(ids, positions, strict=True):
        to.token_ids.append(token)
        if isinstance(to, pb.InputLogProbs):  # the first token has none
            to.token_logprobs.add(value=None if position is None else position[token].logprob)
        else:
            assert position is not None
            to.token_logprobs.append(position[token].logprob)
        if top:
            best = sorted((position or {}).items(), key=lambda item: item[1].rank)[:top]
            to.top_logprobs.add(
                token_ids=[token for token, _ in best], values=[entry.logprob for _, entry in best]
            )


def scheduler_load(load: Load, max_num_seqs: int, counters: bool) -> pb.SchedulerLoad:
    """counters: whether to include the prefix cache's share of hits."""
    used = load.pages - load.free_pages
    return pb.SchedulerLoad(
        num_running_reqs=load.running,
        num_waiting_reqs=load.waiting,
        num_total_reqs=load.running + load.waiting,
        num_used_tokens=used * load.page_size,
        max_total_num_tokens=load.pages * load.page_size,
        token_usage=used / load.pages,
        cache_hit_rate=load.prefix_hits / max(load.prefix_queries, 1) if counters else 0.0,
        utilization=load.running / max_num_seqs,
        max_running_requests=max_num_seqs,
    )


def defaults_of(params: SamplingParams) -> str:
    """The model's default sampling parameters as a JSON object, where they differ from SamplingParams."""
    fields = changed_fields(params)
    return msgspec.json.encode(fields).decode() if fields else ""
