"""Methods of LLM and AsyncLLM for weights that change while the engine runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from jengine.core.weights import Version
from jengine.engine.operations import Operation, UpdateWeights

if TYPE_CHECKING:  # an AsyncLLM over a remote engine needs no jax
    from jengine.api.shared_engine import SharedEngine


class RolloutMethods(ABC):
    """LLM's."""

    _shared: SharedEngine

    @property
    def weights_version(self) -> Version:
        """Of the weights that steps use: 0 at the start; see `update_weights`. Raises EngineDead after
        `close`.
        """
        return self._shared.engine.weights_version

    @property
    def abstract_params(self) -> Any:
        """The parameters that programs take: nested dicts of jax.ShapeDtypeStruct with shardings. Arrays that
        fit these are used without a copy. Raises EngineDead after `close`.
        """
        return self._shared.engine.abstract_params

    def update_weights(
        self,
        weights: Any,
        version: Version | None = None,
        *,
        check_finite: bool = False,
        keep_cache: bool = False,
    ) -> Version:
        """Replace the weights between two steps, without compilation. Needs weight_updates=True.

        All of the model's weights must be given, except those of a draft model, which keeps its own. They are
        checked before anything changes. Each parameter's old array is freed before the new one is made.
        Quantized parameters are quantized on the devices, as at the start.

        Cached pages are forgotten. Running requests go on with the new weights: they compute their tokens so
        far again, so what follows is what the new weights would generate after them. A request's
        prompt_logprobs stay as they were computed. `CompletionOutput.weights_versions` says which version made which token.
        Call `pause` first to end requests, or to wait for them.

        Args:
            weights: as `params` of `start_engine`: arrays by a checkpoint's names, of the model's dtype or
                float32, which are copied; or by the names of `abstract_params`, which the engine shares with
                the caller if they fit.
            version: a name for these weights; None: the number after the current one.
            check_finite: reject weights that are infinite or NaN. Looks at every number, on the host.
            keep_cache: running requests keep the keys and values that earlier weights computed for their
                tokens so far, instead of computing them again.

        Returns:
            The version.

        Raises:
            InvalidArgument: `weights` are no arrays by name, the version is invalid, or the engine takes no
                updates. Nothing has changed.
            ModelError: a tensor is missing, unknown, or has another shape or dtype, or is not finite; the
                message names it. Nothing has changed.
            EngineDead: as `generate`.
        """
        return self._shared.do(UpdateWeights(weights, version, check_finite, keep_cache))


class AsyncRolloutMethods(ABC):
    """AsyncLLM's. Arrays do not travel: an engine in another process takes them from a folder."""

    @abstractmethod
    async def do[T](self, operation: Operation[T]) -> T:
        """See AsyncLLM."""

    async def update_weights(
        self,
        weights: Any,
        version: Version | None = None,
        *,
        check_finite: bool = False,
        keep_cache: bool = False,
    ) -> Version:
        """Replace the weights between two steps; see `LLM.update_weights`, also for errors."""
        return await self.do(UpdateWeights(weights, version, check_finite, keep_cache))
