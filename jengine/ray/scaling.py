"""Chooses the number of replicas by their queued tokens."""

from __future__ import annotations

import math
from typing import Any

# a replica's metric: tokens of unfinished requests, prompts and maximum outputs
QUEUED_TOKENS = "queued_tokens"


class QueuedTokens:
    """An autoscaling policy of Ray Serve. Bounds and delays are those of the deployment's autoscaling_config.

    Args:
        target: tokens per replica.
    """

    def __init__(self, target: float = 16_384) -> None:
        self._target = target

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """The number of replicas, and the policy's state, which is empty."""
        tokens = (context.aggregated_metrics or {}).get(QUEUED_TOKENS, {})
        wanted = math.ceil(sum(tokens.values()) / self._target)
        bounds = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        return max(bounds[0], min(wanted, bounds[1])), {}
