"""The one loop: schedule -> pack -> run -> collect. Knows tokens, no text."""

from __future__ import annotations

import math
import random
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import jax
import numpy as np

from jengine.checkpoints import load, read_config, resolve
from jengine.config import EngineConfig, ModelConfig
from jengine.errors import InvalidArgument
from jengine.execution.memory import pages_for
from jengine.execution.program_store import default_root
from jengine.execution.programs import Programs, open_store
from jengine.execution.runner import InFlight, Runner, StepResult
from jengine.execution.spec import ExecutionSpec
from jengine.models import Model, build
from jengine.observe.compiles import compile_count
from jengine.observe.trace import StepTrace
from jengine.parallel.mesh import make_mesh
from jengine.program_table import ProgramTable
from jengine.request import FinishReason, Request
from jengine.scheduling.costs import StepCosts
from jengine.scheduling.scheduler import Scheduler
from jengine.scheduling.sequence import Sequence, State


@dataclass(frozen=True, slots=True)
class TokenUpdate:
    """A sequence's next token. Its finish_reason, once set, is final unless a stop string is found in the text."""

    sequence: Sequence
    token: int
    finished: bool
    logprob: float = 0.0
    rank: int = 0
    top: list[tuple[int, float]] = field(default_factory=list)


class Engine:
    """A model, loaded and warmed up, and the requests that it works on.

    Attributes:
        model: its configuration.
        start_seconds: what each part of the start took.
        trace: when steps were dispatched and read.
    """

    def __init__(self, config: EngineConfig, *, progress: bool = True) -> None:
        self.config = config
        self.start_seconds: dict[str, float] = {}
        self.trace = StepTrace()
        compile_count()  # starts counting
        clock = time.perf_counter()

        def lap(name: str) -> None:
            nonlocal clock
            now = time.perf_counter()
            self.start_seconds[name], clock = now - clock, now

        self.folder: Path = resolve(config.model, config.revision)
        self.model: ModelConfig = read_config(self.folder)
        mesh = make_mesh(config.tensor_parallel_size)
        device = mesh.devices.flat[0]
        max_model_len = _max_model_len(config, self.model)
        model = build(self.model, _dtype(config, self.model, device), max_model_len)
        lap("configuration")
        params = load(self.folder, model, mesh, progress=progress)
        weights = sum(x.nbytes for x in jax.tree.leaves(params))
        lap("weights")
        self.spec = _spec(config, model, mesh, max_model_len, weights)
        root = Path(config.cache_dir) if config.cache_dir is not None else default_root()
        self.programs = Programs(self.spec, open_store(self.spec, root), threads=config.compile_threads, progress=progress)
        lap("programs")
        self.runner = Runner(self.spec, self.programs, params)
        if self.programs.compiled:
            self.runner.warm_up(progress=progress)
            self.programs.save()
        else:
            self.runner.check()
        lap("warm-up")
        self.scheduler = Scheduler(
            self.spec.table,
            page_size=self.spec.page_size,
            num_pages=self.spec.num_pages,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=max_model_len,
            policy=config.policy,
            costs=StepCosts(self.runner.trunk_costs()),
        )
        self._seeds = random.Random(config.seed)
        self._in_flight: deque[tuple[int, InFlight]] = deque()
        self._steps = 0
        self.compiles_at_start = compile_count()

    @property
    def max_model_len(self) -> int:
        return self.spec.max_model_len

    @property
    def compiles_since_start(self) -> int:
        """XLA compilations in this process since warm-up; each is a bug, here or in what else the process runs."""
        return compile_count() - self.compiles_at_start

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished or a step unread."""
        return self.scheduler.has_work or bool(self._in_flight)

    def check(self, request: Request) -> None:
        """Raises InvalidArgument for token ids outside the vocabulary; `add` checks the rest."""
        vocab = self.model.vocab_size
        limit = f"ids must be in [0, {vocab})"
        ids = request.prompt_token_ids
        if any(type(token) is not int for token in ids):
            raise InvalidArgument("prompt_token_ids", ids, "ids must be whole numbers")
        if ids and not 0 <= min(ids) <= max(ids) < vocab:
            raise InvalidArgument("prompt_token_ids", next(t for t in ids if not 0 <= t < vocab), limit)
        for token in request.params.stop_token_ids:
            if token >= vocab:
                raise InvalidArgument("stop_token_ids", token, limit)
        self.scheduler.check(request, self.model.eos_token_ids)

    def add(self, request: Request) -> Sequence:
        """Queue a request.

        Raises:
            InvalidArgument: it can never be answered; says why. Nothing has been queued then.
        """
        self.check(request)
        seed = request.params.seed
        return self.scheduler.add(
            request,
            seed=self._seeds.getrandbits(64) if seed is None else seed,
            eos_token_ids=self.model.eos_token_ids,
        )

    def finish(self, sequence: Sequence, reason: FinishReason, stop_reason: str | None = None) -> None:
        """End a sequence for a reason that only the text shows."""
        self.scheduler.finish(sequence, reason, stop_reason)

    def abort(self, request_id: str) -> Sequence | None:
        """End a request early; None where there is none, or it has ended."""
        return self.scheduler.abort(request_id)

    def step(self) -> list[TokenUpdate]:
        """Dispatch the next step, then read the one before it. Returns the tokens that were read."""
        plan = self.scheduler.schedule()
        if plan is not None:
            self._in_flight.append((self._steps, self.runner.dispatch(plan)))
            self.trace.add("dispatch", self._steps, f"{plan.trunk} {plan.sampler}")
            self._steps += 1
        wait_for = 1 if self.config.overlap and plan is not None else 0
        updates: list[TokenUpdate] = []
        while len(self._in_flight) > wait_for:
            number, step = self._in_flight.popleft()
            result = self.runner.read(step)
            self.trace.add("read", number)
            updates += self._collect(step, result)
        return updates

    def _collect(self, step: InFlight, result: StepResult) -> list[TokenUpdate]:
        collected = self.scheduler.collect(step.plan, result.tokens)
        if result.logprobs is None:
            return [TokenUpdate(sequence, token, sequence.state is State.FINISHED) for sequence, token in collected]
        rows = {sequence: row for row, sequence in step.plan.sampled}
        got = result.logprobs
        updates = []
        for sequence, token in collected:
            row, count = rows[sequence], sequence.request.params.logprobs or 0
            top = list(zip(got.top_ids[row, :count].tolist(), got.top_logprobs[row, :count].tolist(), strict=True))
            finished = sequence.state is State.FINISHED
            updates.append(TokenUpdate(sequence, token, finished, float(got.logprobs[row]), int(got.ranks[row]), top))
        return updates


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    if config.max_model_len is None:
        return model.max_position
    longest, rope = float(model.max_position), model.rope_scaling
    if rope is not None:
        longest = math.inf if rope.kind == "dynamic" else max(longest, rope.factor * rope.original_max_position)
    if config.max_model_len > longest:
        raise InvalidArgument("max_model_len", config.max_model_len, f"the model's positions end at {longest:.0f}")
    return config.max_model_len


def _dtype(config: EngineConfig, model: ModelConfig, device: jax.Device) -> str:
    """auto: what the checkpoint has, but float32 on a CPU, where narrower products are emulated."""
    if config.dtype != "auto":
        return config.dtype
    return "float32" if device.platform == "cpu" else model.dtype


def _spec(config: EngineConfig, model: Model, mesh: jax.sharding.Mesh, max_model_len: int, weights: int) -> ExecutionSpec:
    device = mesh.devices.flat[0]
    on_cpu = device.platform == "cpu"
    page_size = config.page_size or (16 if on_cpu else 64)
    num_pages = pages_for(
        config, model.config, page_size=page_size, max_model_len=max_model_len, dtype=np.dtype(model.dtype), device=device, weights=weights
    )
    table = ProgramTable.build(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        tile_size=config.tile_size,
        page_buckets=(0,) if on_cpu else page_buckets(-(-max_model_len // page_size)),
    )
    return ExecutionSpec(
        model=model, mesh=mesh, table=table, max_model_len=max_model_len, max_slots=config.max_num_seqs, page_size=page_size, num_pages=num_pages
    )


def page_buckets(width: int) -> tuple[int, ...]:
    """Static page counts for XLA attention on a GPU: fourfold steps up to the table's width."""
    buckets = [width]
    while buckets[-1] > 32:
        buckets.append(-(-buckets[-1] // 4))
    return tuple(reversed(buckets))
