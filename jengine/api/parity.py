"""Compares a model with a reference, such as the trainer's model: log probabilities of prompts and of
generated tokens by position, the tokens that each would choose, and hidden states by layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jengine.api.forward import Forward
from jengine.api.llm import LLM
from jengine.api.prompts import Prompt
from jengine.base.errors import InvalidArgument, ModelError
from jengine.core.request import SamplingParams


class Limits(NamedTuple):
    """Differences that rounding explains, in a dtype.

    Attributes:
        largest, mean: of log probabilities.
        hidden: relative, of hidden states: |a - b| / |b| over a whole text.
    """

    largest: float
    mean: float
    hidden: float


LIMITS = {
    "float32": Limits(largest=1e-3, mean=1e-4, hidden=2e-5),
    "bfloat16": Limits(largest=1.0, mean=0.1, hidden=0.05),
    "float16": Limits(largest=0.2, mean=0.01, hidden=0.01),
}
QUANTILES = 0.01, 0.5, 0.99
EMBEDDINGS = -1


class ReferenceOutput(NamedTuple):
    """What a reference computes for a text of N tokens.

    Attributes:
        logits: float [N, vocab], of the next token at each position; log probabilities will do.
        hidden: the embeddings [N, hidden], then each layer's output, the last one after the final norm, as
            transformers' `output_hidden_states`; None: not known.
    """

    logits: Any
    hidden: Sequence[Any] | None = None


Reference = Callable[[np.ndarray], ReferenceOutput | Any]  # int32 [N] -> ReferenceOutput, or the logits alone


@dataclass(frozen=True)
class Differences:
    """Differences of log probabilities of tokens, between the model and the reference.

    Attributes:
        tokens: how many were compared.
        largest, mean: absolute differences.
        text, position: where the largest one is.
        choices: positions at which the most likely tokens differ.
        first: the first of these: its text and position, the model's and the reference's token, and by how
            much the reference prefers its own; None: there is none.
    """

    tokens: int
    largest: float
    mean: float
    text: int
    position: int
    choices: int
    first: tuple[int, int, int, int, float] | None


@dataclass(frozen=True)
class Parity:
    """How far a model is from a reference.

    Attributes:
        prompts: differences of the prompts' log probabilities.
        rollouts: differences of sampled tokens' log probabilities; None: nothing was generated.
        ratio: quantiles 1 %, 50 %, 99 % of the importance ratio p_reference / p_model of sampled tokens.
        layers: relative differences of hidden states: embeddings, then layers; None: not compared.
        layer: the first that differs by more than `limits.hidden`; -1: the embeddings; None: none does.
        why_no_layers: why they were not compared.
        limits: what rounding explains.
    """

    prompts: Differences
    rollouts: Differences | None
    ratio: tuple[float, float, float] | None
    layers: tuple[float, ...] | None
    layer: int | None
    why_no_layers: str
    limits: Limits

    @property
    def equal(self) -> bool:
        """Whether rounding explains all differences."""
        parts = [part for part in (self.prompts, self.rollouts) if part is not None]
        close = all(part.largest <= self.limits.largest and part.mean <= self.limits.mean for part in parts)
        return close and self.layer is None

    def plain(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {"equal": self.equal, **dataclasses.asdict(self), "limits": self.limits._asdict()}


def verify(
    llm: LLM, reference: Reference, *, texts: Sequence[Sequence[int]] | None = None, rollout: int = 32
) -> Parity:
    """Compares an LLM with a reference: a function of a text, such as the model in a trainer's code.

    Hidden states are those of `Forward` with the folder's weights; log probabilities are the engine's.

    Args:
        reference: int32 [N] -> ReferenceOutput, or logits alone: float [N, vocab].
        texts: token ids of prompts, at least two each; None: 8 random ones of 2 to 64 tokens.
        rollout: number of tokens to sample after each prompt, at temperature 1; 0: none.

    Raises:
        InvalidArgument: a text is too short, or too long for the LLM.
        ModelError: the reference's arrays have another form.
    """
    limits, vocab = LIMITS[llm.started.dtype], llm.engine.limits.vocab_size
    longest = llm.engine.limits.sequence.max_model_len - 2
    if not 0 <= rollout <= longest:
        raise InvalidArgument("rollout", rollout, f"must be from 0 to {longest}, two less than max_model_len")
    prompts = _random_texts(vocab, longest + 2 - rollout) if texts is None else [[*text] for text in texts]
    if (shortest := min(map(len, prompts), default=0)) < 2:
        raise InvalidArgument("texts", f"{shortest} tokens", "there must be texts, each with at least 2")
    params = [
        SamplingParams(max_tokens=max(rollout, 1), seed=i, ignore_eos=True, logprobs=1, prompt_logprobs=1)
        for i in range(len(prompts))
    ]
    outputs = llm.generate(list[Prompt](prompts), params, use_tqdm=False)
    pairs, sampled, errors = list[_Pair](), list[_Pair](), list[list[float]]()
    states = _States(llm)
    for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        answer: Any = output.outputs[0]
        completion = answer.token_ids if rollout else []
        tokens = np.array([*prompt, *completion], np.int32)
        expected = _answer(reference(tokens), len(tokens), vocab)
        entries = [*(output.prompt_logprobs or [])[1:], *answer.logprobs[: len(completion)]]
        for position, entry in enumerate(entries, 1):
            pair = _Pair.of(number, position, int(tokens[position]), entry, expected.logits[position - 1])
            (pairs if position < len(prompt) else sampled).append(pair)
        if expected.hidden is not None and not states.why:
            errors.append(states.errors(tokens, expected.hidden))
    each = np.max(errors, axis=0).tolist() if errors else None
    wrong = [layer for layer, error in enumerate(each or (), EMBEDDINGS) if not error <= limits.hidden]
    ratios = np.exp([pair.theirs - pair.ours for pair in sampled]) if sampled else None
    return Parity(
        prompts=_differences(pairs),
        rollouts=_differences(sampled) if sampled else None,
        ratio=None if ratios is None else tuple(np.quantile(ratios, QUANTILES).tolist()),
        layers=None if each is None else tuple(each),
        layer=wrong[0] if wrong else None,
        why_no_layers="" if errors else states.why or "the reference gives none",
        limits=limits,
    )


class _Pair(NamedTuple):
    """A token's log probabilities, and what each side would choose there."""

    text: int
    position: int
    ours: float
    theirs: float
    choice: int
    their_choice: int
    margin: float  # by which the reference prefers its choice

    @classmethod
    def of(cls, text: int, position: int, token: int, entry: Any, expected: np.ndarray) -> _Pair:
        choice = min(entry, key=lambda known: entry[known].rank or len(expected))
        best = int(expected.argmax())
        margin = float(expected[best] - expected[choice])
        ours, theirs = entry[token].logprob, float(expected[token])
        return cls(text, position, ours, theirs, choice if margin else best, best, margin)


def _differences(pairs: Sequence[_Pair]) -> Differences:
    sizes = [abs(pair.ours - pair.theirs) for pair in pairs]
    # NaN is the largest
    worst = max(range(len(pairs)), key=lambda at: (sizes[at] != sizes[at], sizes[at]))
    other = [pair for pair in pairs if pair.choice != pair.their_choice]
    return Differences(
        tokens=len(pairs),
        largest=sizes[worst],
        mean=float(np.mean(sizes)),
        text=pairs[worst].text,
        position=pairs[worst].position,
        choices=len(other),
        first=None
        if not other
        else (other[0].text, other[0].position, other[0].choice, other[0].their_choice, other[0].margin),
    )


class _States:
    """Hidden states of an LLM's model. `why`: why there are none."""

    def __init__(self, llm: LLM) -> None:
        self.why = ""
        try:
            self._forward = Forward(llm.started.folder, dtype=llm.started.dtype)
            self.why = self._forward.indivisible
        except ModelError as error:
            self.why = error.reason
        self._params: Any = None

    def errors(self, tokens: np.ndarray, expected: Sequence[Any]) -> list[float]:
        """The relative difference of the embeddings, and of each layer's output. JAX compiles by length."""
        self._params = self._params or self._forward.load()
        padded = np.pad(tokens, (0, min(-len(tokens) % 128, self._forward.max_model_len - len(tokens))))
        states = self._forward.hidden_states(self._params, jnp.asarray(padded[None]))
        ours = [np.asarray(state, np.float32)[0, : len(tokens)] for state in states]
        theirs = [np.asarray(state, np.float32) for state in expected]
        shapes = [state.shape for state in theirs]
        if shapes != [state.shape for state in ours]:
            raise ModelError(
                f"the reference's hidden states are {shapes}, not {len(ours)} of {ours[0].shape}"
            )
        return [
            float(np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), 1e-30))
            for a, b in zip(ours, theirs, strict=True)
        ]


def _answer(answer: Any, length: int, vocab: int) -> ReferenceOutput:
    """Log probabilities in place of logits. Raises ModelError if they have another form."""
    logits, hidden = answer if isinstance(answer, ReferenceOutput) else (answer, None)
    array = np.asarray(logits, np.float32)
    if array.ndim != 2 or array.shape[0] != length or array.shape[1] < vocab:
        raise ModelError(f"the reference's logits are {array.shape}, not {(length, vocab)}")
    array = array[:, :vocab]
    high = array.max(-1, keepdims=True)
    return ReferenceOutput(array - high - np.log(np.exp(array - high).sum(-1, keepdims=True)), hidden)


def _random_texts(vocab: int, longest: int) -> list[list[int]]:
    random = np.random.default_rng(0)
    sizes = np.linspace(2, 64, 8, dtype=int)
    return [random.integers(0, vocab, min(size, longest)).tolist() for size in sizes]
