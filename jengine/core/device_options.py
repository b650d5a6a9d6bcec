"""The options of EngineConfig about devices, processes and compiled programs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from jengine.base.errors import InvalidArgument
from jengine.base.options import size, whole
from jengine.parallel.layout import Layout

PIPELINE, PARTITION = "pipeline_parallel_size", "pipeline_layers"


def hashable(name: str, value: Any) -> Any:
    """A list as a tuple; layer_numbers checks it."""
    return tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True, kw_only=True)
class ProgramOptions:
    """Compiled programs.

    Args:
        cache_dir: the folder of saved programs. By default jengine's folder in the user's cache.
        cache_max_size: the largest size of that folder, such as "20GiB"; above it, the least recently used
            programs are removed. By default 10GiB. With several processes, the limit applies to each of them.
        programs: a folder that `jengine compile` wrote for this model, these options and this device. The
            engine then compiles nothing. A dtype of auto and an unset num_pages take the folder's values.
        warm_up: when the engine is ready. progressive: when the few programs that can serve any request are
            ready; the others follow while it runs. all: when every program is ready.
        compile_threads: programs compiled at once, at most. By default 2 on a CPU, and on a GPU one for each
            core of the host, as far as cores and memory are free; at most cpu_threads.
    """

    cache_dir: str | Path | None = None
    cache_max_size: Annotated[int | str | None, size] = None
    programs: str | Path | None = None
    warm_up: Literal["progressive", "all"] = "progressive"
    compile_threads: Annotated[int | None, whole(1)] = None


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """Devices and processes.

    Args:
        cpu_threads: threads of a CPU that compute, compile and tokenize at once. By default all cores that
            the process may use. All engines of a process must use the same number, and the first one must be
            created before JAX starts.
        tensor_parallel_size: devices that share the model. If there are fewer kv heads than devices, they are
            repeated, which takes proportionally more cache.
        data_parallel_size: ranks that compute different sequences, each with its own cache on
            tensor_parallel_size devices. With enable_expert_parallel, they are parts of one engine and share
            its experts; max_num_seqs and other limits are those of each. Otherwise they are replicas: engine
            processes behind a server, each with its own GPUs or a share of the CPUs. A prompt goes to the one
            that is predicted to give its first token soonest. A replica that ends is replaced, and prompts
            that it had not begun go to others.
        enable_expert_parallel: divides whole experts among the devices, instead of dividing each expert.
            Devices then multiply with larger matrices, for fewer tokens each.
        pipeline_parallel_size: stages that the model's layers are divided into, each with
            tensor_parallel_size devices, for each rank if there are several. As many steps run at once, each
            with a part of the sequences.
        pipeline_layers: numbers of layers of the stages, as 20,21,21,18. By default stages of equal cost; the
            last one has the output head as well.
        coordinator: host:port where process 0 listens, if several processes share the model, on one machine
            or on many. Start all with the same options except process_id; only process 0 takes requests.
        num_processes: processes that share the model. Together they have tensor_parallel_size devices for
            each stage.
        process_id: index of this process, from 0.
    """

    cpu_threads: Annotated[int | None, whole(1)] = None
    tensor_parallel_size: Annotated[int, whole(1)] = 1
    data_parallel_size: Annotated[int, whole(1, 64)] = 1
    enable_expert_parallel: bool = False
    pipeline_parallel_size: Annotated[int, whole(1)] = 1
    pipeline_layers: Annotated[str | None, hashable] = None
    coordinator: str | None = None
    num_processes: Annotated[int, whole(1)] = 1
    process_id: Annotated[int, whole(0)] = 0

    @property
    def layout(self) -> Layout:
        """How the model lies over the devices."""
        return Layout(
            stages=self.pipeline_parallel_size,
            data=self.data_parallel_size if self.enable_expert_parallel else 1,
            tensor=self.tensor_parallel_size,
            expert_parallel=self.enable_expert_parallel,
        )


def check_devices(options: DeviceOptions) -> None:
    """Raises InvalidArgument if options do not go together."""
    layer_numbers(options.pipeline_parallel_size, options.pipeline_layers)
    if options.process_id >= options.num_processes:
        limit = f"must be below num_processes={options.num_processes}"
        raise InvalidArgument("process_id", options.process_id, limit)
    if options.num_processes > 1 and not re.fullmatch(r".+:\d+", str(options.coordinator)):
        limit = "must be host:port, where process 0 listens"
        raise InvalidArgument("coordinator", options.coordinator, limit)


def layer_numbers(stages: int, value: Any) -> tuple[int, ...] | None:
    """The numbers of layers by stage that an option gives, as a list or as text with commas between them.

    Raises:
        InvalidArgument: they are not as many whole numbers, from 1, as there are stages.
    """
    if value is None:
        return None
    parts = value.split(",") if isinstance(value, str) else value
    limit = f"must be {stages} numbers of layers, one for each stage, such as 16,16"
    try:
        if not isinstance(parts, Sequence) or any(isinstance(part, bool | float) for part in parts):
            raise ValueError
        numbers = tuple(int(part) for part in parts)
    except (TypeError, ValueError):
        raise InvalidArgument(PARTITION, value, limit) from None
    if len(numbers) != stages or min(numbers) < 1:
        raise InvalidArgument(PARTITION, value, limit)
    return numbers


def check_pipeline(config: Any) -> None:
    """Checks that an EngineConfig with several stages has no option that a pipeline lacks.

    Raises:
        InvalidArgument: one of them is set.
    """
    stages = config.pipeline_parallel_size
    if stages == 1:
        return
    many = f"with {PIPELINE}={stages}"
    drafts = "drafts follow a sequence's last token, which would have to be read before each of its steps"
    for name, refused, why in (
        ("num_scheduler_steps", (8,), f"must be 1 or auto {many}: a burst is one program of all layers"),
        ("enable_lora", (True,), f"must be False {many}: adapters are not divided into stages"),
        ("weight_updates", (True,), f"must be False {many}: weights are not divided while it runs"),
        ("strategy", ("latency", "auto"), f"must be throughput or memory {many}: targets are not predicted"),
    ):
        if getattr(config, name) in refused:
            raise InvalidArgument(name, getattr(config, name), why)
    for name in ("calibration_data", "programs", "kv_transfer_config"):
        if getattr(config, name) is not None:
            raise InvalidArgument(name, str(getattr(config, name)), f"must be None {many}")
    if config.speculative_config not in ("auto", "none", None):
        raise InvalidArgument(
            "speculative_config", config.speculative_config, f"must be auto or none {many}: {drafts}"
        )
