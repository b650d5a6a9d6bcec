"""Random requests of all kinds, run with drafts and without them, and a comparison of what they answer."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jengine.api.outputs import LiveOutputs
from jengine.api.prompts import make_requests
from jengine.core.request import CompletionOutput, Logprob, RequestOutput, SamplingParams, prompt_seed
from jengine.core.structured_outputs import StructuredOutputs
from jengine.engine.loop.engine import Engine
from jengine.execution.logits import ALL_ALLOWED, mask_words
from jengine.scheduling.drafters.drafter import Draft
from jengine.scheduling.requests.sequence import Sequence
from jengine.text.masks import make_mask
from jengine.text.tokenizer import Tokenizer
from tests.engine.replay import ERROR, Replay
from tests.engine.structures import structures
from tests.execution.oracle import Oracle
from tests.golden.heads import write_eagle3, write_mtp
from tests.golden.weights import write_model
from tests.text.conftest import byte_level, write

LENGTH = 192  # tokens of a sequence at most
LETTERS = [*range(66, 74)]  # the tokens of a to h
HEAD = "head"
END = 73  # h, an end-of-sequence token
CLOSE = 1e-4  # of a log probability: programs of other shapes sum in another order
FORCED = (
    StructuredOutputs(regex="(the same text|the same words) and then [ab]{4}"),
    StructuredOutputs(choice=("abcabcabc", "abcabcdef", "the quick brown fox")),
    StructuredOutputs(
        json={
            "type": "object",
            "properties": {"first": {"type": "boolean"}, "second": {"enum": ["abc", "abd", 7]}},
            "required": ["first", "second"],
            "additionalProperties": False,
            "x-guidance": {"whitespace_flexible": False},
        }
    ),
)


def write_text_model(folder: Path, variant: str, head: str | None = None) -> Path:
    """A tiny model with a tokenizer, and an end-of-sequence token that may come anywhere.

    Args:
        head: mtp, or eagle3: a head in the folder HEAD.
    """
    tokenizer = byte_level()
    vocab = tokenizer.get_vocab_size()
    make = write_mtp if head == "mtp" else write_model
    make(folder, variant, vocab_size=vocab, eos_token_id=[1, END])
    if head == "eagle3":
        write_eagle3(folder / HEAD, variant, vocab_size=vocab)
    return write(tokenizer, folder)


@dataclass(frozen=True)
class Job:
    """A prompt's requests.

    abort_after: tokens of the first completion, after which the caller aborts. lora: the adapter's name.
    """

    prompt: list[int]
    params: SamplingParams
    salt: str | None
    priority: int
    abort_after: int | None
    lora: str | None = None


def random_jobs(count: int, *, vocab: int, seed: int) -> list[Job]:
    """Every parameter, alone and combined. Many prompts repeat themselves or begin alike."""
    draw = random.Random(seed)
    wanted = [*FORCED, *(structure.asked for structure in structures(12, seed))]

    def some(least: int, most: int) -> list[int]:
        return [draw.randrange(2, vocab) for _ in range(draw.randint(least, most))]

    beginnings = [some(16, 90) for _ in range(4)]
    jobs = []
    for number in range(count):
        kind = draw.random()
        if kind < 0.35:
            prompt = (some(2, 9) * 40)[: draw.randint(8, 100)]
        elif kind < 0.65:
            prompt = [*draw.choice(beginnings), *some(0, 20)]
        else:
            prompt = some(1, 110)
        params = random_params(draw, vocab, wanted, seed=1000 * seed + number)
        jobs.append(
            Job(
                prompt,
                params,
                draw.choice([None, None, None, "a", "b"]),
                draw.randint(0, 3),
                draw.randint(1, 12) if draw.random() < 0.06 else None,
            )
        )
    return jobs


def random_params(
    draw: random.Random, vocab: int, wanted: List[StructuredOutputs], *, seed: int
) -> SamplingParams:
    most = draw.choice([1, 3, 12, 20, 30, 60])
    temperature = draw.choice([0.0, 0.0, 0.0, 0.1, 0.5, 0.8, 1.0, 1.5, 2.0])
    how: dict[str, Any] = {"temperature": temperature, "seed": seed, "max_tokens": most}
    if temperature:
        how["n"] = draw.choice([1, 1, 1, 2, 3])
    choices = {
        "top_k": (0.15, lambda: draw.randint(1, 40)),
        "top_p": (0.15, lambda: draw.uniform(0.3, 1.0)),
        "min_p": (0.15, lambda: draw.choice([0.001, 0.02, 0.3])),
        "repetition_penalty": (0.15, lambda: draw.choice([0.6, 1.2, 2.0])),
        "presence_penalty": (0.1, lambda: draw.uniform(-2, 2)),
        "frequency_penalty": (0.15, lambda: draw.uniform(-2, 2)),
        "min_tokens": (0.15, lambda: draw.randint(1, most)),
        "ignore_eos": (0.4, lambda: True),
        "stop_token_ids": (0.15, lambda: draw.sample(range(2, vocab), draw.choice([2, 2, 30]))),
        "logprobs": (0.4, lambda: draw.choice([0, 1, 5])),
        "prompt_logprobs": (0.08, lambda: draw.choice([0, 2])),
        "bad_words": (0.08, lambda: draw.sample(["a", "b", "ab", "ba", "cd", " the", "fox"], 2)),
        "logit_bias": (0.1, lambda: {token: draw.uniform(-5, 5) for token in draw.sample(LETTERS, 4)}),
        "allowed_token_ids": (0.08, lambda: sorted({*LETTERS, 1, *draw.sample(range(2, vocab), 8)})),
        "structured_outputs": (0.15, lambda: draw.choice(wanted)),
        "include_stop_str_in_output": (0.1, lambda: True),
    }
    how |= {name: value() for name, (often, value) in choices.items() if draw.random() < often}
    if draw.random() < 0.15:  # stop strings, of tokens that come often
        how |= {"stop": draw.sample(["e", "ab", "ba", "cd", "ff", "ga"], 3)}
        how |= {"logit_bias": dict.fromkeys(LETTERS, 6.0)}
    return SamplingParams(**how)


def serve(
    engine: Engine, tokenizer: Tokenizer, jobs: List[Job], *, at_once: int, seed: int = 0
) -> list[RequestOutput]:
    """Runs the jobs, at most `at_once` together. Order, arrivals and aborts depend on the seed, and on how
    fast tokens come.
    """
    draw, live, outputs = random.Random(seed), LiveOutputs(tokenizer), dict[int, RequestOutput]()
    left, steps, scheduler = [*range(len(jobs))], 0, engine.scheduler
    draw.shuffle(left)
    while left or engine.has_work:
        running = sum(not output.finished for output in outputs.values())
        while left and running < at_once and (not running or draw.random() < 0.6):
            number, running = left.pop(), running + 1
            job = jobs[number]
            prompt: Any = {"prompt_token_ids": job.prompt, "cache_salt": job.salt}
            requests = make_requests(tokenizer, prompt, job.params, str(number))
            for request in requests:
                request.priority, request.lora_name = job.priority, job.lora
            engine.limits.validate(requests[0])
            outputs[number] = live.open(requests)
            engine.add(*requests)
        for output in live.take(engine.step()):
            after = jobs[int(output.request_id)].abort_after
            if after is not None and not output.finished and len(output.outputs[0].token_ids) >= after:
                live.abort(output.request_id)
        for ended in live.ended:
            engine.end(*ended)
        live.ended.clear()
        steps += 1
        if not steps % 8:
            scheduler.check_integrity()
    assert scheduler.blocks.owned == 0 and all(output.finished for output in outputs.values())
    return [outputs[number] for number in range(len(jobs))]


class Silent:
    """A drafter without drafts."""

    max_drafts = 1

    def draft(self, sequence: Sequence, most: int) -> Draft | None:
        return None

    def forget(self, sequence: Sequence) -> None:
        pass


class Guessing(Silent):
    """Drafts random tokens, most of them the sequence's own, and as often as not none."""

    max_drafts = 15

    def __init__(self, vocab: int, seed: int = 0) -> None:
        self._draw, self._vocab = random.Random(seed), vocab

    def draft(self, sequence: Sequence, most: int) -> Draft | None:
        draw, tokens = self._draw, sequence.tokens
        drafts = [
            draw.choice(tokens) if draw.random() < 0.8 else draw.randrange(self._vocab)
            for _ in range(draw.choice([0, draw.randint(1, most)]))
        ]
        return Draft(drafts, source="random") if drafts else None


def known_tokens(outputs: List[RequestOutput]) -> dict[str, list[int]]:
    """By request id, what its completion says, and a little more: text may end it within a draft."""
    return {
        f"{output.request_id}/{completion.index}" if completion.index else output.request_id: [
            *completion.token_ids,
            *LETTERS[:4],
        ]
        for output in outputs
        for completion in output.outputs
    }


class Judge(Replay):
    """Says whether rounding may have decided between two tokens, with the model's own logits."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, LENGTH)

    def either(self, job: Job, index: int, before: list[int], tokens: set[int]) -> bool:
        """Whether each of these tokens may come after `before`."""
        params, prompt = job.params, job.prompt
        assert params.seed is not None
        raw = self.logits([*prompt, *before])
        draws = self.draws(prompt_seed(params.seed, prompt), index)
        error = ERROR * max(params.repetition_penalty, 1 / params.repetition_penalty)
        possible = Oracle(self._adjusted(raw, prompt, before, params), params, error).possible(
            draws[len(prompt) + len(before)]
        )
        return tokens <= possible

    def _allowed(self, params: SamplingParams, output: list[int]) -> np.ndarray:
        words = np.full(mask_words(self._vocab), ALL_ALLOWED)
        if (mask := make_mask(params, self._tokenizer)) is not None:
            for token in output:
                mask.accept(token)
            mask.fill(words)
        bits = words[:, None] >> np.arange(32, dtype=np.uint32) & 1
        return bits.reshape(-1)[: self._vocab].astype(bool)

    def _continues(self, what: StructuredOutputs, output: list[int]) -> np.ndarray:
        allowed = self._allowed(SamplingParams(structured_outputs=what), output)
        return np.where(self._ends, allowed[self._ends].any(), allowed)


class Unequal(AssertionError):
    """Two answers differ in more than rounding explains."""


def compare(
    got: List[RequestOutput],
    expected: List[RequestOutput],
    jobs: List[Job],
    judge: Callable[[], Judge] | None,
) -> int:
    """Compares answers. Log probabilities may differ by CLOSE; the number of completions that differ where
    the judge says that rounding decides is returned. Without a judge, every bit must be equal.
    """
    excused = 0
    for one, other, job in zip(got, expected, jobs, strict=True):
        if _prompt_scores(one) and _prompt_scores(other):  # neither was aborted before
            scores = _prompt_scores(one), _prompt_scores(other)
            _same_scores(*scores, judge is None, job.params.prompt_logprobs or 0, job)
        for a, b in zip(one.outputs, other.outputs, strict=True):
            excused += _differs(a, b, job, judge)
    return excused


def _prompt_scores(output: RequestOutput) -> list[dict[int, Logprob]]:
    return [entry for entry in output.prompt_logprobs or () if entry is not None]


def _differs(a: CompletionOutput, b: CompletionOutput, job: Job, judge: Callable[[], Judge] | None) -> bool:
    """Whether rounding made two completions differ. Raises Unequal if they differ otherwise."""
    aborted = "abort" in (a.finish_reason, b.finish_reason)
    both = min(len(a.token_ids), len(b.token_ids))
    for i, (token, expected) in enumerate(zip(a.token_ids, b.token_ids, strict=False)):
        if token != expected:
            if judge is None or not judge().either(job, a.index, b.token_ids[:i], {token, expected}):
                raise Unequal(f"token {i}: {token} and {expected}: {job} {a} {b}")
            both = i
            break
    same = both == min(len(a.token_ids), len(b.token_ids))
    if a.logprobs is not None and b.logprobs is not None:
        _same_scores(a.logprobs[:both], b.logprobs[:both], judge is None, job.params.logprobs or 0, job)
    if same and not aborted:
        ends = [
            (x.text, x.finish_reason, x.stop_reason, len(x.token_ids), x.logprobs is None) for x in (a, b)
        ]
        if ends[0] != ends[1]:
            raise Unequal(f"{ends[0]} and {ends[1]}: {job}")
    return not same


def _same_scores(
    got: List[Mapping[int, Logprob]],
    expected: List[Mapping[int, Logprob]],
    exact: bool,
    top: int,
    job: Job,
) -> None:
    for i, (one, other) in enumerate(zip(got, expected, strict=True)):
        equal = (
            one == other and [*one] == [*other]
            if exact
            else _close(one, other, top) and _close(other, one, top)
        )
        if not equal:
            raise Unequal(f"log probabilities {i}: {one} and {other}: {job}")


def _close(one: Mapping[int, Logprob], other: Mapping[int, Logprob], top: int) -> bool:
    """A token that only one has must be as likely as the other's last of its best ones."""
    best = [entry.logprob for entry in other.values() if entry.rank <= max(top, 1)]
    least = min(best, default=-math.inf)  # none: only the sampled token, which both have
    return next(iter(one)) == next(iter(other)) and all(
        abs(entry.logprob - (other[token].logprob if token in other else least)) < CLOSE
        for token, entry in one.items()
    )
