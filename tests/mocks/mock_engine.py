"""An engine without a model, for testing and measuring the server."""

from __future__ import annotations

import itertools
import json
import time
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jengine import BeamSearchParams, InvalidArgument, Load, LoraInfo, ModelError, Tokenizer, Trace
from jengine.serving.calls.model_provider import EngineInfo
from jengine.serving.processes.engines import WarmEngine, prepared
from jengine.spi import (
    Beam,
    BeamsFound,
    Embedder,
    EngineFacts,
    GetTrace,
    Limits,
    ListLoras,
    LoadLora,
    LoraLimits,
    LoraLoad,
    Operation,
    Pooled,
    PromptScores,
    Request,
    Reranker,
    ResetPrefixCache,
    SequenceLimits,
    SetStrategy,
    StepTotals,
    TokenLogprobs,
    TokenUpdate,
    UnloadLora,
    Update,
)

PROGRAMS = 41  # an arbitrary number
IMAGE_ROWS = 1024  # of an image
MAX_RANK = 16  # of an adapter
LOOKED_UP = 4096  # maximum prompt tokens looked up: enough for tests, and cheap for prompts of millions


@dataclass(slots=True)
class _Sequence:
    request: Request
    max_len: int
    pages: int  # number of owned pages
    generated: int = 0
    cached: int = 0  # prompt tokens
    scheduled: float = 0.0  # seconds, monotonic


class MockEngine:
    """Repeats each prompt's tokens, beginning at the sample's index: deterministic and immediate.

    Like a real engine, it runs at most `max_num_seqs` requests, each step gives each of them a token, and
    each owns cache pages for all of its tokens from start to end. It supports only parameters that end a
    request, and log probabilities, which are artificial. If a prompt has the same beginning and salt as an
    earlier one, the common whole pages count as cached, up to LOOKED_UP tokens. An embedding contains counts
    of the prompt's token ids modulo its size.

    With an adapter, each token's id is larger by `shift_of` its name. An adapter is any folder with an
    adapter_config.json.

    Args:
        embedding_size: numbers in an embedding; 0: embeddings are not supported.
        reranker: in its limits. Both of its tokens are equally probable.
        max_loras: in its limits; 0: there are no adapters.
        max_cpu_loras: in its limits.
        seconds: duration of a step.
        fail_at: index of the step that raises an error, from 0.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 3072,
        max_model_len: int = 1024,
        max_num_seqs: int = 32,
        page_size: int = 16,
        pages: int = 1024,
        eos_token_ids: tuple[int, ...] = (),
        seconds: float = 0.0,
        fail_at: int | None = None,
        embedding_size: int = 0,
        reranker: Reranker | None = None,
        max_loras: int = 0,
        max_cpu_loras: int | None = None,
        image_rows: int = 0,
    ) -> None:
        room = SequenceLimits(max_model_len=max_model_len, page_size=page_size, pages=pages)
        self.limits = Limits(
            sequence=room,
            max_num_seqs=max_num_seqs,
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            embedder=Embedder(size=embedding_size) if embedding_size else None,
            reranker=reranker,
            image_rows=image_rows,
            lora=LoraLimits(max_loras=max_loras, max_lora_rank=MAX_RANK, max_cpu_loras=max_cpu_loras)
            if max_loras
            else None,
        )
        self.seconds, self.fail_at, self.steps = seconds, fail_at, 0
        self._waiting: deque[_Sequence] = deque()
        self._running: dict[str, _Sequence] = {}
        self._free_pages = pages
        self._prefixes = _Prefixes(page_size, pages)
        self._strategy = "throughput"
        self._loras = MockLoras(self.limits.lora)

    @property
    def load(self) -> Load:
        return Load(
            running=len(self._running),
            waiting=len(self._waiting),
            free_pages=self._free_pages,
            pages=self.limits.sequence.pages,
            page_size=self.limits.sequence.page_size,
            preemptions=0,
            compiles_since_start=0,
            cached_pages=min(len(self._prefixes.known), self._free_pages),
            prefix_queries=self._prefixes.queries,
            prefix_hits=self._prefixes.hits,
            hit_pages=(self._prefixes.hits // self.limits.sequence.page_size,),
            cache_groups=("full",),
            evictions=self._prefixes.evictions,
            programs_ready=PROGRAMS,
            programs=PROGRAMS,
            strategy=self._strategy,
            first_token_seconds=self.seconds * (1 + len(self._waiting)),
            loras=self._loras.load(
                [sequence.request for sequence in [*self._running.values()]],
                [sequence.request for sequence in [*self._waiting]],  # its thread may change them meanwhile
            ),
        )

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    has_requests = has_work

    @property
    def has_unused_programs(self) -> bool:
        return False

    def add(self, *requests: Request) -> None:
        room = self.limits.sequence
        for request in requests:
            self._loras.check(request)
            max_len = room.max_len(request)
            self._waiting.append(_Sequence(request, max_len, room.most_pages(max_len - 1)))

    def end(self, request_id: str, reason: str, stop_reason: str | None = None) -> None:
        if (sequence := self._running.pop(request_id, None)) is not None:
            self._free_pages += sequence.pages
            return
        for sequence in self._waiting:
            if sequence.request.request_id == request_id:
                self._waiting.remove(sequence)
                return

    def do(self, operation: Operation[Any]) -> Any:
        """Operations that concern the model's engine are imitated: a strategy is only reported in the load,
        and the trace is empty.
        """
        match operation:
            case ResetPrefixCache():
                self._prefixes.known.clear()
                return True
            case SetStrategy(strategy):
                self._strategy = strategy
                return None
            case GetTrace():
                room = self.limits.sequence
                facts = EngineFacts(
                    self.limits.max_num_seqs,
                    room.max_model_len,
                    room.max_model_len,
                    room.page_size,
                    room.pages,
                )
                return Trace.empty(facts)
            case LoadLora():
                return self._loras.add(operation)
            case UnloadLora(name):
                return self._loras.remove(name)
            case ListLoras():
                return self._loras.listed
            case _:
                return operation.run(self)  # type: ignore[arg-type]

    def close(self) -> None:
        pass

    def passed_on(self) -> None:
        pass

    def totals(self) -> StepTotals:
        return StepTotals()

    def step(self) -> list[Update]:
        if self.steps == self.fail_at:
            raise FloatingPointError("the mock engine fails as requested")
        self.steps += 1
        if self.seconds:
            time.sleep(self.seconds)
        updates: list[Update] = self._admit()
        ended = []
        for request_id, sequence in self._running.items():
            update = self._update(request_id, sequence)
            updates.append(update)
            if not isinstance(update, TokenUpdate) or update.finish_reason is not None:
                ended.append(request_id)
        for request_id in ended:
            self._free_pages += self._running.pop(request_id).pages
        return updates

    def _admit(self) -> list[Update]:
        scores: list[Update] = []
        while (
            self._waiting
            and len(self._running) < self.limits.max_num_seqs
            and self._waiting[0].pages <= self._free_pages
        ):
            sequence = self._waiting.popleft()
            request = sequence.request
            self._running[request.request_id] = sequence
            sequence.scheduled = time.monotonic()
            sequence.cached = self._prefixes.admit(request)
            self._free_pages -= sequence.pages
            if (count := request.params.prompt_logprobs) is not None and len(request.prompt_token_ids) > 1:
                tokens = request.prompt_token_ids[1:]
                scores.append(
                    PromptScores(request.request_id, 1, tokens, [_logprobs(token, count) for token in tokens])
                )
        return scores

    def _update(self, request_id: str, sequence: _Sequence) -> TokenUpdate | Pooled | BeamsFound:
        if sequence.request.beams is not None:
            return self._beams(request_id, sequence, sequence.request.beams)
        return (
            self._next(request_id, sequence)
            if sequence.request.pooling is None
            else self._embedding(request_id, sequence)
        )

    def _beams(self, request_id: str, sequence: _Sequence, params: BeamSearchParams) -> BeamsFound:
        """Beam i equals sample i."""
        prompt = sequence.request.prompt_token_ids
        count = sequence.max_len - len(prompt)
        beams = [
            Beam([prompt[(index + at) % len(prompt)] for at in range(count)], -0.5 * count - index, "length")
            for index in range(params.beam_width)
        ]
        return BeamsFound(request_id, beams, 0, sequence.scheduled, sequence.cached)

    def _next(self, request_id: str, sequence: _Sequence) -> TokenUpdate:
        request, params = sequence.request, sequence.request.params
        prompt = request.prompt_token_ids
        allowed = params.allowed_token_ids
        token = allowed[0] if allowed else self._token(request, sequence.generated)
        token = (token + shift_of(request.lora_name)) % self.limits.vocab_size
        sequence.generated += 1
        reason = stop_reason = None
        if sequence.generated > params.min_tokens:
            if token in params.stop_token_ids:
                reason, stop_reason = "stop", token
            elif token in self.limits.eos_token_ids and not params.ignore_eos:
                reason = "stop"
        if reason is None and len(prompt) + sequence.generated >= sequence.max_len:
            reason = "length"
        logprobs = None if params.logprobs is None else _logprobs(token, params.logprobs)
        times = 0, sequence.scheduled, sequence.cached
        return TokenUpdate(request_id, token, reason, stop_reason, logprobs, *times)  # type: ignore[arg-type]

    def _token(self, request: Request, place: int) -> int:
        """The token at this place of the answer."""
        prompt = request.prompt_token_ids
        return prompt[(request.sample_index + place) % len(prompt)]

    def _embedding(self, request_id: str, sequence: _Sequence) -> Pooled:
        params, size = sequence.request.pooling, self.limits.embedder.size if self.limits.embedder else 0
        assert params is not None
        ids = np.array(sequence.request.prompt_token_ids)
        ids += shift_of(sequence.request.lora_name)
        counts = np.bincount(ids % size, minlength=size).astype(np.float32)[: params.dimensions]
        if params.normalize:
            counts /= max(float(np.linalg.norm(counts)), 1.0)
        return Pooled(request_id, counts.tobytes(), 0, sequence.scheduled, sequence.cached)


class _Prefixes:
    """Pages of earlier prompts, by the preceding pages. The oldest are forgotten if there are too many.

    Attributes:
        known: an id for each page, by the id of the preceding page (or the salt) and its tokens. Ids are
            unique.
        queries, hits: numbers of tokens.
    """

    def __init__(self, page_size: int, pages: int) -> None:
        self.known: OrderedDict[tuple[int | str | None, tuple[int, ...]], int] = OrderedDict()
        self.queries = self.hits = self.evictions = 0
        self._page_size, self._pages = page_size, pages
        self._ids = itertools.count()

    def admit(self, request: Request) -> int:
        """Number of the prompt's tokens that are known, always fewer than all. From now on, all are."""
        prompt, size, found = request.prompt_token_ids[:LOOKED_UP], self._page_size, 0
        salt = request.cache_salt
        parent: int | str | None = salt if request.lora_name is None else f"{request.lora_name}\0{salt}"
        for start in range(0, len(prompt) // size * size, size):
            page = (parent, tuple(prompt[start : start + size]))
            known = self.known.get(page)
            if known is not None:
                found += size
            parent = self.known[page] = next(self._ids) if known is None else known
        while len(self.known) > self._pages:
            self.known.popitem(last=False)
            self.evictions += 1
        if request.params.prompt_logprobs is not None or (
            request.pooling is not None and request.pooling.needs_all
        ):
            return 0
        cached = min(found, (len(prompt) - 1) // size * size)
        self.queries, self.hits = self.queries + len(prompt), self.hits + cached
        return cached


def _logprobs(token: int, count: int) -> TokenLogprobs:
    return TokenLogprobs(-0.5, 1, [(token + i, -0.5 - i) for i in range(count)])


def shift_of(name: str | None) -> int:
    """What an adapter adds to each token's id: the sum of its name's bytes."""
    return 0 if name is None else sum(name.encode("utf-8", "surrogatepass"))


class MockLoras:
    """Loaded adapters by name."""

    def __init__(self, limits: LoraLimits | None) -> None:
        self._limits, self._loaded = limits, dict[str, LoraInfo]()

    @property
    def listed(self) -> list[LoraInfo]:
        return [*self._loaded.values()]

    def load(self, running: Iterable[Request], waiting: Iterable[Request]) -> LoraLoad | None:
        if self._limits is None:
            return None
        used = (
            tuple(sorted({request.lora_name for request in of if request.lora_name is not None}))
            for of in (running, waiting)
        )
        return LoraLoad(self._limits.max_loras, len(self._loaded), *used)

    def check(self, request: Request) -> None:
        if request.lora_name is not None and request.lora_name not in self._loaded:
            raise InvalidArgument("lora_request", request.lora_name, "is not loaded")

    def add(self, asked: LoadLora) -> LoraInfo:
        """Raises as LoadLora."""
        assert self._limits is not None
        if asked.name in self._loaded and not asked.load_inplace:
            raise InvalidArgument("lora_name", asked.name, "is loaded already")
        most = self._limits.max_cpu_loras
        if most is not None and len(self._loaded.keys() - {asked.name}) >= most:
            raise InvalidArgument("lora_name", asked.name, f"max_cpu_loras={most} adapters are loaded")
        file = Path(asked.path) / "adapter_config.json"
        try:
            rank = int(json.loads(file.read_bytes())["r"])
        except (OSError, ValueError, KeyError, TypeError) as wrong:
            raise ModelError(f"cannot be read: {wrong!r}", file=file) from None
        if rank > MAX_RANK:
            raise ModelError(f"module q_proj has rank {rank}, above max_lora_rank={MAX_RANK}", file=file)
        number = asked.lora_int_id
        info = LoraInfo(
            name=asked.name, path=asked.path, rank=rank, modules=("q_proj",), bytes=0, lora_int_id=number
        )
        self._loaded[asked.name] = info
        return info

    def remove(self, name: str) -> None:
        """Raises as UnloadLora."""
        if self._loaded.pop(name, None) is None:
            raise InvalidArgument("lora_name", name, "is not loaded")


def mock_engine(
    tokenizer_folder: str | None = None, image_folder: str | None = None, **options: Any
) -> WarmEngine:
    """A MockEngine with these options, for an engine process.

    Args:
        tokenizer_folder: that of its server's tokenizer.
        image_folder: says how its server reads images; the engine ignores them.
    """
    tokenizer = None if tokenizer_folder is None else prepared(Tokenizer.load(Path(tokenizer_folder)))
    return WarmEngine(
        MockEngine(**options, image_rows=IMAGE_ROWS if image_folder else 0),
        tokenizer,
        EngineInfo(
            tokenizer_folder=tokenizer_folder,
            image_folder=image_folder,
            max_images=4,
            image_rows=IMAGE_ROWS,
            dtype="none",
            devices="none",
        ),
    )
