"""The beams of one prompt, and vLLM's rule for choosing the survivors."""

from __future__ import annotations

from typing import NamedTuple

from jengine.core.beam_params import BeamSearchParams
from jengine.core.request import FinishReason
from jengine.core.updates import Beam, ScoredToken


class Path(NamedTuple):
    """A beam's generated tokens, as a linked list whose beginning other beams may share.

    Attributes:
        cumulative: sum of the tokens' log probabilities.
        length: tokens, the prompt's included.
        found: the candidates among which the last token was chosen.
    """

    parent: Path | None
    token: int
    cumulative: float
    length: int
    found: ScoredToken


class Beams[Sequence]:
    """The beams of one prompt. Each is held by one of `width` sequences, which own slots, and pages while
    they hold a beam.

    Args:
        prompt_len: length of the prompt in tokens.

    Attributes:
        leader: the request's own sequence.
        members: all sequences of the search.
        live: the beams of the next step, the best first, by the sequence that holds each.
    """

    def __init__(
        self, params: BeamSearchParams, leader: Sequence, prompt_len: int, eos_token_ids: tuple[int, ...]
    ) -> None:
        self.params, self.leader, self._prompt_len, self._ends = params, leader, prompt_len, eos_token_ids
        self.members = [leader]
        self.live: dict[Sequence, Path | None] = {leader: None}
        self._found: dict[Sequence, ScoredToken] = {}  # candidates of this step
        self._completed: list[Path] = []  # beams that ended with an end-of-sequence token, the best first

    def take(self, beam: Sequence, scored: ScoredToken) -> list[tuple[Sequence, Path]] | None:
        """Records a beam's candidates.

        Returns:
            The surviving beams, each with the sequence of the beam that it extends, the best first; None
            while the candidates of other beams are missing.
        """
        self._found[beam] = scored
        if len(self._found) < len(self.live):
            return None
        going: list[tuple[Sequence, Path]] = []
        ended: list[Path] = []
        stops = not self.params.ignore_eos
        for parent, path in self.live.items():
            before, length = (0.0, self._prompt_len) if path is None else (path.cumulative, path.length)
            for token, logprob in candidates(self._found[parent]).items():
                following = Path(path, token, before + logprob, length + 1, self._found[parent])
                if stops and token in self._ends:
                    ended.append(following)
                else:
                    going.append((parent, following))
        self._found = {}
        if ended:
            self._completed = self._best([*self._completed, *ended])
        going.sort(key=lambda candidate: self._score(candidate[1]), reverse=True)
        return going[: self.params.beam_width]

    def end(self, live: list[Path], logprobs: bool) -> list[Beam]:
        """Returns the best of the completed beams and of those that could continue. logprobs: whether to
        include the candidates of each position.
        """
        beams = []
        for path in self._best([*self._completed, *live]):
            chain = [path]
            while (parent := chain[-1].parent) is not None:
                chain.append(parent)
            scored = [step.found for step in reversed(chain)]
            tokens = [step.token for step in reversed(chain)]
            reason: FinishReason = "length" if any(path is step for step in live) else "stop"
            beams.append(Beam(tokens, path.cumulative, reason, scored if logprobs else None))
        return beams

    def _best(self, paths: list[Path]) -> list[Path]:
        return sorted(paths, key=self._score, reverse=True)[: self.params.beam_width]

    def _score(self, path: Path) -> float:
        """A beam's score. The length leaves out an end-of-sequence token, even an ignored one, as in vLLM."""
        length = path.length - (path.token in self._ends)
        score: float = path.cumulative / length**self.params.length_penalty
        return score


def candidates(token: ScoredToken) -> dict[int, float]:
    """Log probabilities by token: the sampled token first, then the most likely ones."""
    return {token.token: token.logprobs.chosen, **dict(token.logprobs.top)}
