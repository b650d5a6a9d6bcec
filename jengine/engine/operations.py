"""Operations on a running engine. Each is a message, plain data, with the handler that the engine runs for
it.

A new operation is a class here, and methods of LLM and AsyncLLM in api/engine_methods.py. Threads, engine
processes and the RPC `Do` carry every operation alike.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from types import get_original_bases
from typing import Any, ClassVar, Protocol, get_args

import msgspec

from jengine.base.errors import InvalidArgument
from jengine.core.lora import LoraInfo, LoraSource, check_lora_name
from jengine.engine.limits import Limits
from jengine.insight.profiling.data import ProfileOptions
from jengine.insight.recording.trace import Trace
from jengine.scheduling.scheduler import Scheduler


class Loras(Protocol):
    """An engine's adapters; see adapter_store.py."""

    def load(self, source: LoraSource, *, load_inplace: bool, evict: bool) -> LoraInfo: ...

    def unload(self, name: str) -> None: ...

    def list_loaded(self) -> list[LoraInfo]: ...


class Running(Protocol):
    """The parts of an engine that handlers use. Messages are used in processes without jax, too."""

    @property
    def scheduler(self) -> Scheduler: ...

    @property
    def limits(self) -> Limits: ...

    def trace(self, seconds: float | None) -> Trace: ...

    @property
    def adapters(self) -> Loras | None: ...


class Operation[T](msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message that makes an engine do something and answer with a T. Its fields are the arguments. JSON can
    represent all of these.

    Attributes:
        in_thread: whether `run` takes long. Then it runs in a separate thread while the engine steps;
            otherwise, between two steps.
        remote: administrators may call it over the network. False by default, and for operations that name
            files.
    """

    in_thread: ClassVar[bool] = False
    remote: ClassVar[bool] = False

    def check(self, limits: Limits) -> None:
        """Called before the message is sent. Raises InvalidArgument if an engine with these limits cannot do
        it.
        """

    def run(self, engine: Running) -> T:
        """Does it, and returns the answer. An exception fails this operation alone."""
        raise NotImplementedError

    def answer_of(self, data: bytes) -> T:
        """Decodes the answer from JSON."""
        answer: T = msgspec.json.decode(data, type=get_args(get_original_bases(type(self))[0])[0])
        return answer


def decode_operation(name: str, arguments: bytes | str, *, remote: bool = False) -> Operation[Any]:
    """The operation with this name, and its arguments from a JSON object. With `remote`, only those for the
    network are accepted.

    Raises:
        InvalidArgument: there is no such operation, or an argument is unknown or invalid.
    """
    kinds = {kind.__name__: kind for kind in Operation.__subclasses__() if kind.remote or not remote}
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
    """Forgets all cached pages, so no later request finds one. Running requests keep theirs. Answers whether
    it was done.
    """

    remote = True

    def run(self, engine: Running) -> bool:
        engine.scheduler.blocks.reset()
        return True


class SetStrategy(Operation[None], frozen=True):
    """Changes the strategy from the next step on; see EngineConfig.strategy."""

    strategy: str
    remote = True

    def check(self, limits: Limits) -> None:
        limits.check_strategy(self.strategy)

    def run(self, engine: Running) -> None:
        engine.scheduler.admission.set_strategy(engine.limits.check_strategy(self.strategy))


class GetTrace(Operation[Trace], frozen=True):
    """Answers records of the last `seconds` seconds, or all that are kept."""

    seconds: float | None = None
    remote = True

    def check(self, limits: Limits) -> None:
        if self.seconds is not None and not (math.isfinite(self.seconds) and self.seconds > 0):
            raise InvalidArgument("seconds", self.seconds, "must be a finite number above 0")

    def run(self, engine: Running) -> Trace:
        return engine.trace(self.seconds)


class WriteProfile(Operation[None], frozen=True):
    """Makes the engine's process write its profile to a folder; see capture_process. The process with the id
    `asking` writes none.
    """

    options: ProfileOptions
    folder: str
    asking: int
    in_thread = True

    def run(self, engine: Running) -> None:
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
        evict: if max_cpu_loras adapters are loaded, unload the one that was used least recently, among those
            without requests.

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
    evict: bool = False
    in_thread = True

    def check(self, limits: Limits) -> None:
        check_lora_name(self.name)
        limits.require_lora("lora_name", self.name)
        if bool(self.path) == (self.config is not None):
            raise InvalidArgument("lora_path", self.path, "either a path or config and tensors must be given")

    def run(self, engine: Running) -> LoraInfo:
        assert engine.adapters is not None, "`check` has seen that there are adapters"
        source = LoraSource(self.name, self.path, self.config, self.tensors)
        return engine.adapters.load(source, load_inplace=self.load_inplace, evict=self.evict)


class UnloadLora(Operation[None], frozen=True):
    """Forgets an adapter: no later request can use it. Requests that use it now keep it until they end.

    Raises:
        InvalidArgument: no adapter of this name is loaded.
    """

    name: str
    remote = True

    def check(self, limits: Limits) -> None:
        limits.require_lora("lora_name", self.name)

    def run(self, engine: Running) -> None:
        assert engine.adapters is not None, "`check` has seen that there are adapters"
        engine.adapters.unload(self.name)


class ListLoras(Operation[list[LoraInfo]], frozen=True):
    """Answers the loaded adapters, in the order in which they were loaded; none without enable_lora."""

    remote = True

    def run(self, engine: Running) -> list[LoraInfo]:
        return [] if engine.adapters is None else engine.adapters.list_loaded()
