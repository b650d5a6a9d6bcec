"""LoRA adapters as users name them: plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from jengine.base.errors import InvalidArgument
from jengine.base.options import check_text, check_whole, read_as, whole

MAX_LORA_NAME = 256  # characters
MAX_LORA_RANK = 512


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """The adapter that a request uses, as in vLLM.

    `generate` loads the adapter when its name is used for the first time. Later requests use it by its name,
    until it is unloaded.

    Args:
        lora_name: a name of your choice, at most MAX_LORA_NAME characters.
        lora_int_id: an integer of at least 1, as in vLLM. The name identifies an adapter: a request is an
            error if the loaded adapter of its name has another number or path.
        lora_path: a folder in PEFT's layout, or a hub id. Empty: an adapter that is loaded already.

    Raises:
        InvalidArgument: naming the field, the value and the limit.
    """

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""

    def __post_init__(self) -> None:
        check_lora_name(self.lora_name)
        check_whole("lora_int_id", self.lora_int_id, 1, None)
        if not isinstance(self.lora_path, str):
            raise InvalidArgument("lora_path", self.lora_path, "must be text")

    @property
    def name(self) -> str:
        """vLLM's name of lora_name."""
        return self.lora_name

    @property
    def path(self) -> str:
        """vLLM's name of lora_path."""
        return self.lora_path


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraInfo:
    """A loaded adapter.

    Attributes:
        name: as requests name it.
        path: its folder or hub id; "" if its arrays were handed in.
        lora_int_id: of the LoRARequest with which it was loaded.
        rank: the largest of its modules.
        modules: names of the modules that it changes, such as "q_proj", sorted.
        bytes: of its copy in host memory.
        on_device: whether it has a place on the devices now. If not, the next request that uses it waits
            until it was written to one.
        running, waiting: unfinished requests that use it.
    """

    name: str
    path: str
    rank: int
    modules: tuple[str, ...]
    bytes: int
    on_device: bool = False
    running: int = 0
    waiting: int = 0
    lora_int_id: int = 1


class LoraSource(NamedTuple):
    """Where an adapter comes from: a path, or a configuration and the bytes of a safetensors file."""

    name: str
    path: str = ""
    config: dict[str, Any] | None = None
    tensors: bytes = b""
    lora_int_id: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraLimits:
    """What an engine with `enable_lora` can load; see EngineConfig."""

    max_loras: int
    max_lora_rank: int
    max_cpu_loras: int | None = None
    target_modules: tuple[str, ...] | None = None


def check_lora_name(name: object) -> None:
    """Raises InvalidArgument unless this is text of 1 to MAX_LORA_NAME characters."""
    check_text("lora_name", name, 1, MAX_LORA_NAME)


def target_modules(value: object) -> tuple[str, ...] | None:
    """The names in lora_target_modules, which may have commas between them.

    Raises:
        InvalidArgument: they are no names.
    """
    if value is None:
        return None
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
        raise InvalidArgument("lora_target_modules", value, "must be names of modules")
    names = tuple(name.strip() for item in items for name in item.split(","))
    if not names or not all(names):
        raise InvalidArgument("lora_target_modules", value, "must be names of modules, none of them empty")
    return names


@dataclass(frozen=True, kw_only=True)
class LoraOptions:
    """LoRA adapters.

    Args:
        enable_lora: serve LoRA adapters. Steps without adapters run the same programs as without this option;
            the others have programs of their own, which also compute the adapters.
        max_loras: the number of adapters that requests of one step may use. Each has a place on the device. A
            request whose adapter has none waits for a place that no running request uses.
        max_lora_rank: the largest rank of an adapter. Larger ranks make steps with adapters slower, whatever
            the adapters' own ranks are.
        max_cpu_loras: the most adapters that are loaded at once, each with a copy in host memory; at least
            max_loras. By default there is no limit.
        lora_target_modules: what adapters may change, by names of modules or parts of names, such as q_proj
            or experts; several with commas between them, or as a list. Adapters that change anything else are
            rejected. By default all linear layers but those of experts.
    """

    enable_lora: bool = False
    max_loras: Annotated[int, whole(1)] = 1
    max_lora_rank: Annotated[int, whole(1, MAX_LORA_RANK)] = 16
    max_cpu_loras: Annotated[int | None, whole(1)] = None
    lora_target_modules: Annotated[list[str] | tuple[str, ...] | str | None, read_as(target_modules)] = None

    @property
    def lora(self) -> LoraLimits | None:
        """Limits of adapters; None: they are off."""
        if not self.enable_lora:
            return None
        return LoraLimits(
            max_loras=self.max_loras,
            max_lora_rank=self.max_lora_rank,
            max_cpu_loras=self.max_cpu_loras,
            target_modules=target_modules(self.lora_target_modules),
        )


def check_lora(options: LoraOptions) -> None:
    """Raises InvalidArgument if fewer adapters may be loaded than one step may use."""
    if options.max_cpu_loras is not None:
        check_whole("max_cpu_loras", options.max_cpu_loras, options.max_loras, None)
