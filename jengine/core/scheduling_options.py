"""The options of EngineConfig about steps, and about the order of requests, targets and batches."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from jengine.base.errors import InvalidArgument
from jengine.base.options import number, readable, whole
from jengine.core.speculation import Speculation
from jengine.vllm.translate import value_of

Policy = Literal["fcfs", "priority", "fair"]
StrategyName = Literal["throughput", "latency", "memory", "auto"]
Batching = Literal["continuous", "dynamic", "static"]
OnLate = Literal["serve", "reject"]

STRATEGIES: tuple[StrategyName, ...] = get_args(StrategyName)
WITHOUT_TARGETS: tuple[StrategyName, ...] = ("throughput", "memory")
BURST_STEPS = 8

milliseconds = number("a finite number of milliseconds above 0", open_low=True)
at_least_0 = number("a finite number, at least 0")


def burst(name: str, value: Any) -> int | str:
    """Checks num_scheduler_steps, which may be text where a file or flag gave it."""
    steps = int(value) if isinstance(value, str) and value.isdecimal() else value
    if isinstance(steps, bool) or steps not in (1, BURST_STEPS, "auto"):
        raise InvalidArgument(name, value, f"must be 1, {BURST_STEPS} or auto")
    return steps


at_least_1 = whole(1)


def model_length(name: str, value: Any) -> int | None:
    """Checks max_model_len; vLLM's names of the default are auto and -1."""
    length = None if value == -1 else value_of(name, value)
    return None if length is None else at_least_1(name, length)


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Sequences and steps.

    Args:
        max_model_len: the most tokens of a sequence, prompt and output together. By default the model's
            length.
        max_num_seqs: the most sequences that run at once. By default 32 on a CPU, 256 on a GPU.
        max_num_batched_tokens: the most tokens in a step, those of decoding sequences and of prompts
            together. By default 512 on a CPU, 8192 on a GPU.
        tile_size: tokens in a tile, the unit in which a step computes prompts.
        overlap: dispatch each step before the tokens of the previous one are read, so that the device does
            not wait for the host.
        stream_interval: the fewest new tokens in each output of a stream, except its first and last output.
        record_trace: a file that gets a line for each finished request, for `jengine simulate`: lengths,
            times, targets and keyed hashes that show which prompts share a prefix; no text and no tokens.
    """

    max_model_len: Annotated[int | None, model_length] = None
    max_num_seqs: Annotated[int | None, whole(1)] = None
    max_num_batched_tokens: Annotated[int | None, whole(1)] = None
    tile_size: Annotated[int, whole(1)] = 64
    overlap: bool = True
    stream_interval: Annotated[int, whole(1)] = 1
    record_trace: str | Path | None = None


@dataclass(frozen=True, kw_only=True)
class SchedulingOptions:
    """Scheduling.

    Args:
        policy: the order of waiting requests. fcfs: first come, first served; priority: lower priority values
            first, see priority_ageing; fair: equal shares by tokens, so the client that has been served least
            comes next, and first come, first served among one client's. `jengine serve` has fair by default,
            and fcfs with strategy latency or auto.
        priority_ageing: seconds of waiting that count as one level of priority, so that no request starves.
            With 0, waiting does not count.
        strategy: the goal of each step. throughput: the most tokens a second; latency: requests meet ttft_ms
            and tpot_ms; memory: the fewest preemptions, by admitting a request only when there are pages for
            what it is expected to generate; auto: one of these, by the load. May be changed while the engine
            runs.
        ttft_ms: target for the time from a request's arrival to its first token, in milliseconds. A request
            may set its own.
        tpot_ms: target for each further token, in milliseconds: the n-th is due n times tpot_ms after the
            first. A request may set its own.
        on_late: the treatment of requests that cannot meet their targets, with strategy latency. serve: they
            run after those that can; reject: they end at once, with finish_reason "abort" and stop_reason
            "rejected", and accepted requests meet their targets unless the machine becomes slower.
        batching: when waiting requests may start. continuous: at any time; dynamic: in batches of similar
            lengths, formed when max_num_seqs requests wait or batch_wait_ms have passed; static: the same,
            but a batch starts only when the previous one has ended.
        batch_wait_ms: with dynamic and static batching, the milliseconds that the first request of a batch
            waits for others.
        batch_invariant: a request's tokens and log probabilities are identical to the last bit, whatever else
            is in the batch, and whether or not it is preempted or found in the prefix cache. A step computes
            either all decode rows or a few prompt tiles; max_num_batched_tokens bounds the prompt tokens
            between two decode steps. Options that cannot guarantee this are rejected.
        num_scheduler_steps: decode steps that run as one program, without the host in between: 1 or 8; auto:
            8 while no request waits and these steps take at most 100 ms. By default 1, and auto in an LLM on
            CPUs where no other option rules it out. Steps with prompts, masks, penalties, log probabilities
            or beams run singly. A new request may wait for two such bursts.
        speculative_config: speculative decoding, which changes no output. auto: each step verifies as many
            drafts as pay, according to what steps cost and how often drafts are right; drafts are what
            followed the same tokens earlier in the request or in outputs of the same client and cache_salt,
            and tokens that a grammar leaves no choice. An object sets method (ngram; suffix: drafts come from
            outputs of the same client and cache_salt too; draft_model: a smaller model drafts; mtp: the
            checkpoint's own head; eagle3: a trained head), num_speculative_tokens (most drafts of a sequence
            in a step, up to 15) and, for ngram, prompt_lookup_min and prompt_lookup_max (tokens that must be
            equal, and that are compared at most; by default 5), for draft_model and eagle3, model (given as
            `model` is); the guide to scheduling has the options of suffix. Models with recurrent states have
            up to 7 drafts of a sequence in a step, and on a GPU none with auto. none: off; None: the same.
    """

    policy: Policy = "fcfs"
    priority_ageing: Annotated[float, at_least_0] = 60.0
    strategy: StrategyName = "throughput"
    ttft_ms: Annotated[float | None, milliseconds] = None
    tpot_ms: Annotated[float | None, milliseconds] = None
    on_late: OnLate = "serve"
    batching: Batching = "continuous"
    batch_wait_ms: Annotated[float, at_least_0] = 50.0
    batch_invariant: bool = False
    num_scheduler_steps: Annotated[int | str | None, burst] = None
    speculative_config: Annotated[dict[str, Any] | str | None, readable(Speculation.of)] = None

    @property
    def strategies(self) -> tuple[StrategyName, ...]:
        """Strategies that work with the batching mode: targets need prompts and rows at any time."""
        continuous = self.batching == "continuous" and not self.batch_invariant
        return STRATEGIES if continuous else WITHOUT_TARGETS

    @property
    def draft_tokens(self) -> int:
        """Tokens that a draft model or a head proposes for a sequence in a step; 0: there is none."""
        speculation = Speculation.of(self.speculative_config)
        return speculation.num_speculative_tokens if speculation is not None and speculation.on_device else 0


def check_scheduling(options: SchedulingOptions) -> None:
    """Raises InvalidArgument if options do not go together."""
    if options.strategy not in WITHOUT_TARGETS:
        if options.batching != "continuous":
            limit = f"must be continuous with strategy={options.strategy}: others delay requests"
            raise InvalidArgument("batching", options.batching, limit)
        if options.batch_invariant:
            limit = f"not with strategy={options.strategy}: it mixes prompts and rows in a step"
            raise InvalidArgument("batch_invariant", True, limit)


def check_budget(max_num_seqs: int, max_num_batched_tokens: int, tile_size: int) -> None:
    """Check that a step has room for all decode rows and one tile of a prompt.

    Raises:
        InvalidArgument: max_num_batched_tokens is too small.
    """
    need = max_num_seqs + tile_size
    if max_num_batched_tokens < need:
        limit = f"must be at least max_num_seqs + tile_size = {need}"
        raise InvalidArgument("max_num_batched_tokens", max_num_batched_tokens, limit)
