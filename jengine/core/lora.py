"""LoRA adapters as users name them: plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from jengine.base.checks import check_whole
from jengine.base.errors import InvalidArgument

MAX_LORA_NAME = 256  # characters
MAX_LORA_RANK = 512


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """The adapter that a request uses, as in vLLM.

    `generate` loads the adapter when its name is used for the first time. Later requests use it by its name,
    until it is unloaded.

    Args:
        lora_name: a name of your choice, at most MAX_LORA_NAME characters.
        lora_int_id: a whole number of at least 1, as in vLLM. Adapters are told apart by name; the number is
            not used.
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
        return self.lora_name

    @property
    def path(self) -> str:
        return self.lora_path


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraInfo:
    """A loaded adapter.

    Attributes:
        name: as requests name it.
        path: its folder or hub id; "" if its arrays were handed in.
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


class LoraSource(NamedTuple):
    """Where an adapter comes from: a path, or a configuration and the bytes of a safetensors file."""

    name: str
    path: str = ""
    config: dict[str, Any] | None = None
    tensors: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraLimits:
    """What an engine with `enable_lora` can load; see EngineConfig."""

    max_loras: int
    max_lora_rank: int
    max_cpu_loras: int | None = None
    target_modules: tuple[str, ...] | None = None


def check_lora_name(name: object) -> None:
    """Raises InvalidArgument unless this is text of 1 to MAX_LORA_NAME characters."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_LORA_NAME:
        shown = f"{len(name)} characters" if isinstance(name, str) and name else name
        raise InvalidArgument("lora_name", shown, f"must be text of 1 to {MAX_LORA_NAME} characters")


def check_lora_options(
    enable_lora: bool,
    max_loras: int,
    max_lora_rank: int,
    max_cpu_loras: int | None,
    lora_target_modules: object,
) -> LoraLimits | None:
    """Checks these options of EngineConfig. Returns the limits; None: adapters are off.

    Raises:
        InvalidArgument: a value out of range, or limits without enable_lora.
    """
    check_whole("max_loras", max_loras, 1, None)
    check_whole("max_lora_rank", max_lora_rank, 1, MAX_LORA_RANK)
    if max_cpu_loras is not None:
        check_whole("max_cpu_loras", max_cpu_loras, max_loras, None)
    targets = target_modules(lora_target_modules)
    if not enable_lora:
        return None
    return LoraLimits(
        max_loras=max_loras,
        max_lora_rank=max_lora_rank,
        max_cpu_loras=max_cpu_loras,
        target_modules=targets,
    )


def target_modules(given: object) -> tuple[str, ...] | None:
    """The names in lora_target_modules, which may be given with commas between them.

    Raises:
        InvalidArgument: they are no names.
    """
    if given is None:
        return None
    items = [given] if isinstance(given, str) else given
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
        raise InvalidArgument("lora_target_modules", given, "must be names of modules")
    names = tuple(name.strip() for item in items for name in item.split(","))
    if not names or not all(names):
        raise InvalidArgument("lora_target_modules", given, "must be names of modules, none of them empty")
    return names
