"""jengine as the sampler of a SkyRL backend.

from skyrl.backends.jax import JaxBackend
from jengine import LLM
from jengine.integrations.skyrl.sampler import JengineSampler

class Backend(JaxBackend):
    def __init__(self, base_model, config):
        super().__init__(base_model, config)
        self.sampler = JengineSampler(LLM(base_model, enable_lora=True, max_lora_rank=config.max_lora_rank))

    def sample(self, prepared_batch):
        return self.sampler.sample(prepared_batch)
"""

from __future__ import annotations

import tarfile
from collections.abc import Mapping
from typing import Any, NamedTuple

from cloudpathlib import AnyPath
from skyrl.tinker import types
from skyrl.utils.storage import download_and_unpack

from jengine import (
    LLM,
    InvalidArgument,
    Logprob,
    LoraInfo,
    LoRARequest,
    ModelError,
    RequestOutput,
    SamplingParams,
    TokensPrompt,
)

Results = dict[str, types.SampleOutput | types.ErrorResponse]


class _Sample(NamedTuple):
    prompt: TokensPrompt
    params: SamplingParams
    adapter: str | None


class JengineSampler:
    """Answers SkyRL's PreparedSampleBatch: the method `sample` of its AbstractBackend.

    Like SkyRL's JAX backend, it holds one checkpoint of each model, and is used by one thread at a time.

    Args:
        llm: with enable_lora for models that are adapters; with weight_updates for `update_weights`. Its
            logprobs_mode says which log probabilities samples have; SkyRL's JAX backend returns raw ones.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._held: dict[str, str] = {}  # checkpoints of loaded adapters, by model
        self._whole = "", ""  # model and checkpoint whose weights the engine has; empty: the base model

    def sample(self, prepared_batch: types.PreparedSampleBatch) -> Results:
        """Answers all requests of a batch together.

        A sample ends at its stop tokens and stop strings only, and keeps them. Entries of prompt_logprobs and
        topk_prompt_logprobs are None for the first token. all_session_ids choose among engines, of which
        there is one here.

        Returns:
            By request id; an ErrorResponse for a request that cannot be answered. The others are.

        Raises:
            EngineDead: the LLM was closed, or a step has failed.
        """
        results: Results = {}
        ready: dict[str, list[_Sample]] = {}
        used: dict[str, str] = {}  # checkpoints of this batch, by model
        for request_id, _, start, end, scored, top in prepared_batch.request_batch_slices:
            try:
                if start == end:
                    raise InvalidArgument("num_samples", 0, "must be at least 1")
                ready[request_id] = [
                    self._prepared(prepared_batch, at, top if at == start and (scored or top) else None, used)
                    for at in range(start, end)
                ]
            except (InvalidArgument, ModelError) as error:
                results[request_id] = types.ErrorResponse(error=str(error), status="error")
        outputs = iter(self._generate([sample for samples in ready.values() for sample in samples]))
        for request_id, _, _, _, scored, top in prepared_batch.request_batch_slices:
            if request_id in ready:
                answers = [next(outputs) for _ in ready[request_id]]
                results[request_id] = _answer(answers, scored, top)
        return results

    def load(
        self, model_id: str, checkpoint_id: str, *, config: Mapping[str, Any], tensors: Mapping[str, Any]
    ) -> LoraInfo:
        """Loads an adapter that the trainer holds, in place of the model's earlier checkpoint. An earlier one
        that a later batch names is read from its file again.

        Args:
            config: such as {"r": 8, "lora_alpha": 32}.
            tensors: numpy or JAX arrays by PEFT's names; see `LLM.loras`.

        Raises:
            InvalidArgument, ModelError: as `LLM.loras.load`. Nothing has changed.
        """
        info = self.llm.loras.load(model_id, config=config, tensors=tensors, load_inplace=True)
        self._held[model_id] = checkpoint_id
        return info

    def unload(self, model_id: str) -> None:
        """Forgets a model's adapter, for a backend's `delete_model`. Does nothing if there is none."""
        if self._held.pop(model_id, None) is not None:
            self.llm.loras.unload(model_id)

    def update_weights(self, weights: Any, model_id: str = "", checkpoint_id: str = "") -> None:
        """Replaces all weights, for a model that is trained as a whole. Until the next update, requests for
        this checkpoint are answered, and others are errors. The weights' version is "model_id/checkpoint_id",
        or "base".

        Args:
            weights: see `LLM.update_weights`.
            model_id, checkpoint_id: empty for the base model, to which adapters belong.

        Raises:
            InvalidArgument, ModelError: as `LLM.update_weights`. Nothing has changed.
        """
        self.llm.update_weights(weights, f"{model_id}/{checkpoint_id}" if model_id else "base")
        self._whole = model_id, checkpoint_id

    def close(self) -> None:
        """Frees the engine's memory."""
        self.llm.close()

    def _generate(self, samples: list[_Sample]) -> list[RequestOutput]:
        if not samples:
            return []
        prompts, params, adapters = (list(column) for column in zip(*samples, strict=True))
        lora_request = adapters if any(adapters) else None
        return self.llm.generate(prompts, params, lora_request=lora_request, use_tqdm=False)

    def _prepared(
        self, batch: types.PreparedSampleBatch, at: int, prompt_logprobs: int | None, used: dict[str, str]
    ) -> _Sample:
        """A checked sample.

        Raises:
            InvalidArgument, ModelError: it cannot be answered.
        """
        prompt: TokensPrompt = {"prompt_token_ids": _tokens(batch.all_model_inputs[at])}
        params = _sampling(batch.all_sampling_params[at], prompt_logprobs)
        self.llm.stream(prompt, params).close()  # checks both, and runs nothing
        named = batch.all_model_ids[at], batch.all_checkpoint_ids[at]
        return _Sample(prompt, params, self._adapter(*named, batch.all_checkpoint_paths[at], used))

    def _adapter(self, model: str, checkpoint: str, path: str, used: dict[str, str]) -> str | None:
        if self._whole[0]:
            if (model, checkpoint) != self._whole:
                limit = f"must be {'/'.join(self._whole)}, whose weights the engine has"
                raise InvalidArgument("model and checkpoint", f"{model}/{checkpoint}", limit)
            return None
        if not model:
            return None
        if not checkpoint:
            raise InvalidArgument("checkpoint_id", checkpoint, f"must name a checkpoint of {model}")
        if used.get(model, checkpoint) != checkpoint:
            limit = f"must be {used[model]}: a batch uses one checkpoint of a model"
            raise InvalidArgument("checkpoint_id", checkpoint, limit)
        if self._held.get(model) != checkpoint:
            self._read(model, checkpoint, path)
        used[model] = checkpoint
        return model

    def _read(self, model: str, checkpoint: str, path: str) -> None:
        """Loads an adapter from the file that `save_sampler_checkpoint` has written."""
        if not path:
            raise ModelError(f"checkpoint {checkpoint} of {model} is not loaded, and has no file")
        try:
            with download_and_unpack(AnyPath(path)) as folder:
                self.llm.loras.load(LoRARequest(model, lora_path=str(folder)), load_inplace=True)
        except (OSError, EOFError, tarfile.TarError) as error:
            raise ModelError(f"cannot be read: {error}", file=path) from error
        self._held[model] = checkpoint


def _tokens(model_input: types.ModelInput) -> list[int]:
    tokens: list[int] = []
    for chunk in model_input.chunks:
        if not isinstance(chunk, types.EncodedTextChunk):
            raise InvalidArgument("chunks", chunk.type, "must be encoded_text: prompts are tokens")
        tokens += chunk.tokens
    return tokens


def _sampling(asked: types.SamplingParams, prompt_logprobs: int | None) -> SamplingParams:
    return SamplingParams(
        temperature=asked.temperature,
        max_tokens=asked.max_tokens,
        seed=asked.seed,
        stop_token_ids=asked.stop_tokens or (),
        stop=asked.stop_strings or (),
        top_k=asked.top_k,
        top_p=asked.top_p,
        ignore_eos=True,
        skip_special_tokens=False,
        detokenize=bool(asked.stop_strings),
        logprobs=0,
        prompt_logprobs=prompt_logprobs,
    )


def _answer(outputs: list[RequestOutput], scored: bool, top: int) -> types.SampleOutput | types.ErrorResponse:
    sequences = []
    for output in outputs:
        completion = output.outputs[0]
        if completion.finish_reason not in ("stop", "length"):
            why = f"{completion.finish_reason}: {completion.stop_reason}"
            return types.ErrorResponse(error=f"a sample has ended with {why}", status="error")
        chosen = zip(completion.token_ids, completion.logprobs or [], strict=True)
        sequences.append(
            types.GeneratedSequence(
                stop_reason=completion.finish_reason,
                tokens=completion.token_ids,
                logprobs=[entry[token].logprob for token, entry in chosen],
            )
        )
    answer = types.SampleOutput(sequences=sequences)
    entries, prompt = outputs[0].prompt_logprobs or [], outputs[0].prompt_token_ids
    if scored:
        of_prompt = zip(prompt, entries, strict=True)
        answer.prompt_logprobs = [entry and entry[token].logprob for token, entry in of_prompt]
    if top:
        answer.topk_prompt_logprobs = [entry and _likeliest(entry, top) for entry in entries]
    return answer


def _likeliest(entry: Mapping[int, Logprob], count: int) -> list[tuple[int, float]]:
    ranked = sorted(entry.items(), key=lambda pair: pair[1].rank)
    return [(token, entry.logprob) for token, entry in ranked[:count]]
