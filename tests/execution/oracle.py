"""Which tokens a row may get: the documented meaning of each parameter in vLLM's order, in numpy and float64.

An answer may differ from the oracle's only where rounding decides: a token that lies on a threshold, or a
draw on the border between two tokens. The oracle gives all tokens that are possible then, and tests assert
that this is rare.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from jengine.core.request import SamplingParams

EPS = 1e-5  # of a probability: what float32 sums over a vocabulary may lose
SMALLEST = float(np.finfo(np.float32).tiny)  # float32 may take less for 0


def adjusted(
    logits: np.ndarray,
    params: SamplingParams,
    *,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    allowed: np.ndarray | None = None,
    stops: Collection[int] = (),
) -> np.ndarray:
    """Logits [vocab] after mask, stops, bias and penalties; float64.

    Args:
        output: the tokens before this one.
        allowed: bool [vocab], what masks allow.
        stops: tokens that may not come yet.
    """
    z = logits.astype(np.float64)
    if allowed is not None:
        z[~allowed] = -np.inf
    z[list(stops)] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        z[token] += bias
    times = np.bincount(np.array(output, int), minlength=len(z))
    known = times > 0
    known[list(prompt)] = True
    z = np.where(known, np.where(z > 0, z / params.repetition_penalty, z * params.repetition_penalty), z)
    return z - params.frequency_penalty * times - params.presence_penalty * (times > 0)


class Oracle:
    """The distribution of one row.

    Attributes:
        kept, maybe: bool [vocab], tokens that truncation certainly leaves, and those that it may leave.
        mass: float64 [vocab], of those kept, the likeliest's being 1.

    Args:
        z: adjusted logits [vocab].
        error: by how much each of them may be wrong.
    """

    def __init__(self, z: np.ndarray, params: SamplingParams, error: float = 0.0) -> None:
        assert np.isfinite(z).any(), "no token is left"
        temperature = 1.0 if params.greedy else float(np.clip(params.temperature, 1e-40, 1e40))
        self._error = error / temperature
        self._z = (z - z.max()) / temperature
        self._greedy = params.greedy
        self.kept, self.maybe = self._truncated(params, -1), self._truncated(params, 1)
        self.mass = np.exp(self._z) * self.kept

    def possible(self, u: float) -> set[int]:
        """The tokens that a draw of u may give: one, or several if rounding decides."""
        if self._greedy:
            return set(np.flatnonzero(self._z >= -2 * self._error).tolist())
        share = self.mass / self.mass.sum()
        # all of it may lie before u, or none
        unsure = (np.exp(self._z) * (self.maybe & ~self.kept)).sum() / self.mass.sum()
        slack, ends = EPS + self._error + unsure, np.cumsum(share)
        return set(
            np.flatnonzero(
                (ends > u - slack) & (ends - share <= u + slack) & self.maybe & np.isfinite(self._z)
            ).tolist()
        )

    def _truncated(self, params: SamplingParams, side: int) -> np.ndarray:
        """Applies min_p, then top_k, then top_p; tokens on a threshold are included (side 1) or excluded
        (side -1).
        """
        z, swap = self._z, 2 * self._error  # tokens as near as that may stand in another order
        slack = self._error + np.where(np.isfinite(z), 1e-6 * (1 + np.abs(z)), 0.0)
        min_p = 0.0 if side > 0 and params.min_p < SMALLEST else params.min_p
        with np.errstate(divide="ignore"):
            kept = (z >= np.log(min_p) - side * slack) | (z == 0)
        if 0 < params.top_k < kept.sum():
            kth = np.sort(z[kept])[-params.top_k]
            below = z[z < kth].max(initial=-np.inf)
            kept &= (
                z >= kth - (slack + swap if np.isfinite(kth) else 0.0)
                if side > 0
                else (z > below + swap) | (z == 0)
            )
        if params.top_p < 1:
            mass = np.exp(z) * kept
            order = np.argsort(-z, kind="stable")
            sums = np.concatenate([[0.0], np.cumsum(mass[order])])
            before = sums[np.searchsorted(-z[order], -(z + side * swap))]  # of the likelier ones
            if side * swap < 0:
                before -= mass  # of the token itself
            kept &= (before / mass.sum() < params.top_p + side * (EPS + self._error)) | (z == 0)
        return kept
