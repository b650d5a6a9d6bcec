"""LLM's beam search."""

from __future__ import annotations

from collections.abc import Sequence

from jengine.api.llm_requests import LLMRequests
from jengine.api.loras import LoraRequests
from jengine.api.prompts import Prompt, listed
from jengine.base.checks import check_whole
from jengine.base.errors import InvalidArgument
from jengine.core.beam_outputs import BeamSearchOutput, BeamSearchSequence, sampling_of
from jengine.core.beam_params import BeamSearchParams
from jengine.core.request import RequestOutput
from jengine.text.tokenizer import Tokenizer
from jengine.vllm.translate import accepts


class LLMBeams(LLMRequests):
    """The part of LLM that does beam search, in the same batches and cache as all other requests."""

    tokenizer: Tokenizer

    @accepts
    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
        lora_request: LoraRequests = None,
    ) -> list[BeamSearchOutput]:
        """Runs a beam search for every prompt. Results are in the order of the prompts.

        Args:
            prompts, lora_request: as for `generate`.
            concurrency_limit: maximum number of prompts searched at the same time; None: as many as fit.

        Raises:
            InvalidArgument: a prompt or parameter that can never be answered. Nothing has been run.
            EngineDead: as `generate`.
        """
        if not isinstance(params, BeamSearchParams):
            raise InvalidArgument("params", params, "must be a BeamSearchParams")
        if concurrency_limit is not None:
            check_whole("concurrency_limit", concurrency_limit, 1, None)
        sampling = sampling_of(params, logprobs=2 * params.beam_width)
        each = listed(prompts)
        names = self.loras.names(lora_request, len(each))
        work = [
            self._requests(prompt, sampling, beams=params, lora_name=name)
            for prompt, name in zip(each, names, strict=True)
        ]
        step = concurrency_limit or max(len(work), 1)
        outputs = [
            output
            for start in range(0, len(work), step)
            for output in self._wait_for(work[start : start + step], "searching", use_tqdm)
        ]
        return [BeamSearchOutput(_sequences(self.tokenizer, output, params)) for output in outputs]


def _sequences(
    tokenizer: Tokenizer, output: RequestOutput, params: BeamSearchParams
) -> list[BeamSearchSequence]:
    sequences = []
    for beam in output.outputs:
        tokens = [*output.prompt_token_ids, *beam.token_ids]
        hides = beam.finish_reason == "stop" and not params.include_stop_str_in_output
        sequences.append(
            BeamSearchSequence(
                tokens=tokens,
                logprobs=beam.logprobs or [],
                cum_logprob=beam.cumulative_logprob or 0.0,
                text=tokenizer.decode(tokens[:-1] if hides else tokens),
                finish_reason=beam.finish_reason,
            )
        )
    return sequences
