"""Operations on a running engine. Each is a message, plain data, with the handler that the engine runs for
it.

A new operation is a class here, and methods of LLM and AsyncLLM. Threads, engine processes and the RPC `Do`
carry every operation alike.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from types import get_original_bases
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, get_args

import msgspec

from jengine.base.errors import InvalidArgument
from jengine.base.options import check_whole
from jengine.base.process import return_memory
from jengine.core.lora import LoraInfo, LoraSource, check_lora_name
from jengine.core.weights import PAUSED, TAGS, PauseMode, Tag, Version, check_mode, check_tags, next_version
from jengine.engine.limits import Limits
from jengine.insight.profiling.data import ProfileOptions
from jengine.insight.recording.trace import Trace

if TYPE_CHECKING:  # operations are used in processes without jax, too
    from jengine.engine.loop.engine import Engine


class Operation[T](msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message that makes an engine do something and answer with a T. Its fields are the arguments. JSON can
    represent all of these.

    Attributes:
        local: whether its fields cannot be sent to another process.
        in_thread: whether `run` takes long. Then it runs in a separate thread while the engine steps;
            otherwise, between two steps.
        unbounded: whether `run` may take longer than any step, as it moves weights. No watchdog limits it.
        remote: administrators may call it over the network. False by default, and for operations that name
            files.
        rollout: over the network only if the server's option rollout_api is set.
    """

    local: ClassVar[bool] = False
    in_thread: ClassVar[bool] = False
    unbounded: ClassVar[bool] = False
    remote: ClassVar[bool] = False
    rollout: ClassVar[bool] = False

    def check(self, limits: Limits) -> None:
        """Called before the message is sent. Raises InvalidArgument if the limits exclude it."""

    def run(self, engine: Engine) -> T:
        """Does it, and returns the answer. An exception fails this operation alone."""
        raise NotImplementedError

    def joined(self, answers: Sequence[T]) -> T:
        """The answer for several engines that have all done it, from that of each: the first one's."""
        return answers[0]

    def answer_of(self, data: bytes) -> T:
        """Decodes the answer from JSON."""
        answer: T = msgspec.json.decode(data, type=get_args(get_original_bases(type(self))[0])[0])
        return answer


def decode_operation(
    name: str, arguments: bytes | str, *, remote: bool = False, rollout: bool = True
) -> Operation[Any]:
    """The operation with this name, and its arguments from a JSON object. With `remote`, only those for the
    network are accepted; without `rollout`, none of those that rollouts need.

    Raises:
        InvalidArgument: there is no such operation, or an argument is unknown or invalid.
    """
    kinds = {
        kind.__name__: kind
        for kind in Operation.__subclasses__()
        if (kind.remote if remote else not kind.local) and (rollout or not kind.rollout)
    }
    if name not in kinds:
        raise InvalidArgument("operation", name, f"must be one of {', '.join(sorted(kinds))}")
    try:
        operation: Operation[Any] = msgspec.json.decode(arguments, type=kinds[name])
        return operation
    except (msgspec.MsgspecError, UnicodeError) as error:
        if isinstance(error.__cause__, InvalidArgument):
            raise error.__cause__ from None
        raise InvalidArgument("arguments", arguments, str(error)) from None


class ResetPrefixCache(Operation[bool], frozen=True):
    """Forgets all cached pages; running requests keep theirs. Answers whether it was done."""

    remote = True

    def run(self, engine: Engine) -> bool:
        engine.scheduler.blocks.reset()
        return True


class UpdateWeights(Operation[Version], frozen=True):
    """Replaces the weights; see LLM.update_weights. Answers their version."""

    weights: Any  # arrays: this message stays in its process
    version: Version | None = None
    check_finite: bool = False
    keep_cache: bool = False
    local = True

    def run(self, engine: Engine) -> Version:
        return replace_weights(
            engine, self.weights, self.version, check_finite=self.check_finite, keep_cache=self.keep_cache
        )


class LoadWeights(Operation[Version], frozen=True):
    """Replaces the weights by the tensors of a folder: model.safetensors, or shards and their index."""

    folder: str
    version: Version | None = None
    check_finite: bool = False
    keep_cache: bool = False
    unbounded = True

    def run(self, engine: Engine) -> Version:
        from jengine.checkpoints.files import found_tensors  # imports jax, which other processes do not need

        tensors = {name: tensor.array for name, tensor in found_tensors(Path(self.folder), None).items()}
        return replace_weights(
            engine, tensors, self.version, check_finite=self.check_finite, keep_cache=self.keep_cache
        )


def update_of(weights: Any, *rest: Any, **options: Any) -> UpdateWeights | LoadWeights:
    """The operation that takes these weights, arrays or a folder, with its other fields."""
    if isinstance(weights, str | Path):
        return LoadWeights(str(weights), *rest, **options)
    return UpdateWeights(weights, *rest, **options)


class Pause(Operation[None], frozen=True):
    """Stops to plan steps; see LLM.pause. New requests wait."""

    mode: PauseMode = "abort"
    remote = rollout = True

    def check(self, limits: Limits) -> None:
        check_mode(self.mode)

    def run(self, engine: Engine) -> None:
        pause(engine, self.mode)


class Resume(Operation[None], frozen=True):
    """Ends a pause."""

    remote = rollout = True

    def run(self, engine: Engine) -> None:
        resume(engine)


class PauseState(NamedTuple):
    """
    Attributes:
        paused: whether the engine is paused, or sleeps.
        idle: whether it has nothing left to do before it resumes; False while requests finish.
        asleep: what sleep has freed.
        version: of the weights.
    """

    paused: bool
    idle: bool
    asleep: list[Tag]
    version: Version


class GetPauseState(Operation[PauseState], frozen=True):
    """Answers whether the engine is paused, and what sleeps."""

    remote = rollout = True

    def run(self, engine: Engine) -> PauseState:
        gate = engine.gate
        return PauseState(gate.mode is not None, idle(engine), sorted(gate.asleep), engine.weights_version)

    def joined(self, answers: Sequence[PauseState]) -> PauseState:
        return answers[0]._replace(idle=all(state.idle for state in answers))


class Sleep(Operation[bool], frozen=True):
    """Frees memory; see LLM.sleep. Answers whether it was done; if not, running requests end: ask again.
    Raises InvalidArgument at level 2 if nothing can replace the weights.
    """

    level: int = 1
    mode: PauseMode = "abort"
    tags: tuple[Tag, ...] = TAGS
    remote = rollout = unbounded = True

    def check(self, limits: Limits) -> None:
        check_whole("level", self.level, 1, 2)
        check_mode(self.mode)
        check_tags(self.tags)

    def run(self, engine: Engine) -> bool:
        gate = engine.gate
        freed = {*self.tags} - gate.asleep
        if self.level == 2 and "weights" in freed and not engine.weights.updatable:
            raise InvalidArgument("level", 2, "must be 1 without weight_updates: it drops the weights")
        if gate.mode is None:
            pause(engine, self.mode)
            gate.by_sleep = True
        if not idle(engine):
            return False
        engine.settle()
        if "kv_cache" in freed:
            engine.scheduler.preempt_all()
            engine.scheduler.blocks.reset()
            engine.runner.free_cache()
        if "weights" in freed:
            engine.weights.there &= self.level == 1
            if self.level == 2 or not engine.weights.shared:
                engine.runner.move_weights(away=True, keep=self.level == 1)
        gate.asleep |= freed
        return_memory()
        return True

    def joined(self, answers: Sequence[bool]) -> bool:
        return all(answers)


class WakeUp(Operation[None], frozen=True):
    """Takes back memory that sleep has freed."""

    tags: tuple[Tag, ...] = TAGS
    remote = rollout = unbounded = True

    def check(self, limits: Limits) -> None:
        check_tags(self.tags)

    def run(self, engine: Engine) -> None:
        woken = {*self.tags} & engine.gate.asleep
        if "weights" in woken:
            engine.runner.move_weights(away=False)
        if "kv_cache" in woken:
            engine.runner.allocate_cache()
        engine.gate.asleep -= woken
        go_on(engine)


class SetStrategy(Operation[None], frozen=True):
    """Changes the strategy from the next step on; see EngineConfig.strategy."""

    strategy: str
    remote = True

    def check(self, limits: Limits) -> None:
        limits.check_strategy(self.strategy)

    def run(self, engine: Engine) -> None:
        engine.scheduler.admission.set_strategy(engine.limits.check_strategy(self.strategy))


class GetTrace(Operation[Trace], frozen=True):
    """Answers records of the last `seconds` seconds, or all that are kept."""

    seconds: float | None = None
    remote = True

    def check(self, limits: Limits) -> None:
        if self.seconds is not None and not (math.isfinite(self.seconds) and self.seconds > 0):
            raise InvalidArgument("seconds", self.seconds, "must be a finite number above 0")

    def run(self, engine: Engine) -> Trace:
        return engine.trace(self.seconds)


class WriteProfile(Operation[None], frozen=True):
    """Makes the engine's process write its profile to a folder; see capture_process. The process with the id
    `asking` writes none.
    """

    options: ProfileOptions
    folder: str
    asking: int
    in_thread = True

    def run(self, engine: Engine) -> None:
        from jengine.insight.profiling.capture import (
            capture_process,  # imports modules that are rarely needed
        )

        if self.asking != os.getpid():
            try:
                capture_process("engine", self.options, Path(self.folder))
            except OSError as error:
                raise InvalidArgument("profile", "engine", f"{type(error).__name__}: {error}") from error


class LoadLora(Operation[LoraInfo], frozen=True):
    """Loads an adapter into host memory, while the engine steps. Later requests may use its name; the first
    of these waits until the adapter was written to the devices. Nothing is compiled.

    Attributes:
        name: of the adapter; at most MAX_LORA_NAME characters.
        path: a folder in PEFT's layout that the engine's process can read, or a hub id. Servers must check
            paths that come from clients.
        config, tensors: instead of a path, the contents of adapter_config.json and of
            adapter_model.safetensors.
        load_inplace: replace the loaded adapter of this name. Running requests keep the old one, and pages of
            one are never used for the other.
        keep: if max_cpu_loras adapters are loaded, unload the one that was used least recently, among those
            without requests whose names are not here; None: unload none.
        lora_int_id: for LoraInfo.

    Raises:
        InvalidArgument: the engine was started without enable_lora; an adapter of this name is loaded;
            max_cpu_loras adapters are loaded.
        ModelError: the adapter cannot be read, does not fit this model, or has something that is not
            supported; the message names the module. Nothing was loaded.
    """

    name: str
    path: str = ""
    config: dict[str, Any] | None = None
    tensors: bytes = b""
    load_inplace: bool = False
    keep: tuple[str, ...] | None = None
    lora_int_id: int = 1
    in_thread = True

    def check(self, limits: Limits) -> None:
        check_lora_name(self.name)
        limits.require_lora("lora_name", self.name)
        if bool(self.path) == (self.config is not None):
            raise InvalidArgument("lora_path", self.path, "either a path or config and tensors must be given")

    def run(self, engine: Engine) -> LoraInfo:
        assert engine.loras is not None, "`check` has seen that there are adapters"
        source = LoraSource(self.name, self.path, self.config, self.tensors, self.lora_int_id)
        return engine.loras.load(source, load_inplace=self.load_inplace, keep=self.keep)


class UnloadLora(Operation[None], frozen=True):
    """Forgets an adapter: no later request can use it. Requests that use it now keep it until they end.

    Raises:
        InvalidArgument: no adapter of this name is loaded.
    """

    name: str
    remote = True

    def check(self, limits: Limits) -> None:
        limits.require_lora("lora_name", self.name)

    def run(self, engine: Engine) -> None:
        assert engine.loras is not None, "`check` has seen that there are adapters"
        engine.loras.unload(self.name)


class ListLoras(Operation[list[LoraInfo]], frozen=True):
    """Answers the loaded adapters, in the order in which they were loaded; none without enable_lora."""

    remote = True

    def run(self, engine: Engine) -> list[LoraInfo]:
        return [] if engine.loras is None else engine.loras.list_loaded()


def pause(engine: Engine, mode: PauseMode) -> None:
    """Stops planning steps; `LLM.pause` says what becomes of running requests."""
    engine.gate.mode, engine.gate.by_sleep = mode, False
    if mode == "wait":
        return
    engine.settle()
    if mode == "abort":
        engine.end_early([*engine.scheduler.registry.by_id], "abort", PAUSED)


def idle(engine: Engine) -> bool:
    """Whether a paused engine has nothing left to do before it resumes."""
    gate = engine.gate
    return bool(gate.asleep) or not (gate.mode == "wait" and engine.has_steps)


def resume(engine: Engine) -> None:
    """Goes on with requests."""
    gate = engine.gate
    if gate.asleep:
        limit = "the engine sleeps: call wake_up first"
        raise InvalidArgument("asleep", ", ".join(sorted(gate.asleep)), limit)
    if not engine.weights.there:
        raise InvalidArgument("weights", None, "the engine has none: call update_weights first")
    if gate.mode is not None:
        gate.open(
            engine.queue,
            lambda requests, why: engine.end_early(
                [request.request_id for request in requests], "error", str(why)
            ),
        )


def go_on(engine: Engine) -> None:
    """Resumes an engine that sleep has paused, once it has all that it needs."""
    if engine.gate.by_sleep and not engine.gate.asleep and engine.weights.there:
        resume(engine)


def replace_weights(
    engine: Engine, weights: Any, version: Version | None, *, check_finite: bool, keep_cache: bool
) -> Version:
    """Replaces the weights, all or none."""
    live, gate = engine.weights, engine.gate
    version = next_version(version, live.version)
    checked = live.check(weights, check_finite=check_finite)
    engine.settle()
    if not keep_cache:
        engine.scheduler.preempt_all()
    engine.scheduler.blocks.reset()
    if checked.encoder is not None:
        engine.scheduler.registry.images.reset()
    try:
        live.replace(checked, version)
    finally:
        if not live.there and gate.mode is None:  # the devices failed: requests wait for weights
            gate.mode, gate.by_sleep = "keep", True
    if "weights" in gate.asleep:
        engine.runner.move_weights(away=False)  # those of a draft model, which are not replaced
        gate.asleep.remove("weights")
    go_on(engine)
    return version
