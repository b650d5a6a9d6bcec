"""The tokens that a step gave to its sequences."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass

from jengine.scheduling.requests.sequence import Sequence
from jengine.scheduling.step_plan import Sample, StepPlan, Tokens


@dataclass(slots=True)
class Collected:
    """New tokens in the plan's order. Lists by field, since objects for each token would cost a large step
    much time.

    Attributes:
        samples: for each token, the index of its sample in the plan.
        sequences: its sequence.
        tokens: its id.
    """

    samples: List[int]
    sequences: list[Sequence]
    tokens: list[int]

    def add(self, sample: int, sequence: Sequence, token: int) -> None:
        assert isinstance(self.samples, list)
        self.samples.append(sample)
        self.sequences.append(sequence)
        self.tokens.append(token)

    def __iter__(self) -> Iterator[tuple[int, Sequence, int]]:
        return zip(self.samples, self.sequences, self.tokens, strict=True)


def by_sample(plan: StepPlan, tokens: Tokens) -> Iterator[tuple[int, Sample, list[int]]]:
    """The tokens that each sequence gets, with the first of its samples and that sample's index."""
    samples, i = plan.samples, 0
    while i < len(samples):
        sampled, span = tokens[i], plan.spans[samples[i].span]
        got = [sampled] if isinstance(sampled, int) else sampled
        if span.guesses:
            for draft in span.following or ():
                if draft != got[-1]:
                    break
                following = tokens[i + len(got)]
                assert isinstance(following, int)
                got.append(following)
        yield i, samples[i], got
        i += 1 + span.guesses
