"""The configuration of a model and of an engine: plain data, validated once, on construction."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from jengine.base.checks import check_number, check_targets, check_whole, parse_bytes
from jengine.base.errors import InvalidArgument
from jengine.core.image_options import IMAGE_ROWS, image_limit, processing_options
from jengine.core.kv_transfer import KvTransfer
from jengine.core.lora import LoraLimits, check_lora_options, target_modules
from jengine.core.page_events import PageEvents
from jengine.core.pipeline import layer_numbers
from jengine.core.quantization import Quantization as Quantization
from jengine.core.quantization import check_four_bits
from jengine.core.scheduling_options import Batching, OnLate, Policy, StrategyName
from jengine.core.speculation import Speculation
from jengine.parallel.layout import Layout
from jengine.vllm.translate import ENGINE_SETTINGS, HINTS, LIBRARY_SETTINGS, takes, value_of

DTYPES = ("float32", "bfloat16", "float16")
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
CheckpointFormat = Literal["awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "mxfp4", "gguf"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
BURST_STEPS = 8
PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size")


@takes({**ENGINE_SETTINGS, **LIBRARY_SETTINGS})
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """An engine's options. None lets the engine choose for the model and the device. vLLM's names work too,
    for options that jengine has under another name and for those that need none.

    Args:
        model: `demo`, a folder in Hugging Face's layout, a GGUF file, or a hub id.
        revision: branch, tag or commit of a model on the hub.
        tokenizer: another model to take the tokenizer from; by default the model's own.
        chat_template: a Jinja template for conversations instead of the model's: a file, or the template
            itself.
        generation_config: the source of sampling parameters for requests that set none. auto: the model's
            generation_config.json; vllm: the defaults of SamplingParams.
        dtype: number format of weights, activations and cache. auto: the checkpoint's where the device
            supports it, float16 on a GPU without bfloat16; on a CPU float32 instead of a narrower one, unless
            the CPU multiplies that one natively or is measured to be faster with it.
        quantization: quantizes weights on load. By default they stay as the checkpoint has them. int8:
            weights in eight bits, with a scale for each output channel; w8a8: activations too, with a scale
            for each row; fp8: both as e4m3, but embeddings and output heads in int8, emulated on devices
            older than Hopper and Ada; int4: weights in four bits, with a scale and an offset for each group
            of inputs, embeddings in int8; int4_mixed: the same, but queries, keys and values, and an MLP's
            last matrix, which lose most, in int8; w4a8: weights as int4, activations as w8a8, embeddings
            as w8a8; none: converts the weights of a quantized checkpoint to
            dtype; awq, gptq, compressed-tensors, mxfp4, gguf: keeps them, and requires that the checkpoint
            has this format.
        quantization_group_size: inputs that share a scale and an offset in four bits: 32, 64 or 128. Smaller
            groups lose less.
        calibration_data: for four bits, a file of text: the model reads it at the start, and weights are
            rounded so that errors cancel on such text (GPTQ). Takes longer, and the memory of unquantized
            weights; on one device only.
        kv_cache_dtype: number format of the KV cache. int8 and fp8 (e4m3) have a scale for each token and kv
            head; auto: the same as dtype.
        embeddings: compile programs for embeddings. By default, only if the model's folder has
            sentence-transformers' files, which say how the model computes embeddings.
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
        limit_mm_per_prompt: the most images of a prompt, as {"image": 4}; by default 999. With {"image": 0},
            a model with images serves text alone, and its encoder of images is not loaded.
        mm_processor_kwargs: fields that replace those of the model's preprocessor_config.json. Qwen's models
            have min_pixels and max_pixels (or size, with shortest_edge and longest_edge, also in pixels),
            SmolVLM and Idefics3 size.longest_edge and do_image_splitting. A request may have others, as long
            as its images have no more embeddings.
        image_pool_rows: embeddings of images that the devices hold, at least those of the largest part of an
            image that is encoded by itself. A prompt's images must fit; they are kept for later prompts until
            others need their place. By default max_model_len, but at most 16384, or the largest image's.
            Where a model reads images of any size, larger images are scaled down to this many embeddings, by
            default 1024.
        max_model_len: the most tokens of a sequence, prompt and output together. By default the model's
            length.
        max_num_seqs: the most sequences that run at once. By default 32 on a CPU, 256 on a GPU.
        max_num_batched_tokens: the most tokens in a step, those of decoding sequences and of prompts
            together. By default 512 on a CPU, 8192 on a GPU.
        page_size: tokens in a page of the KV cache. By default 16 on a CPU, 64 on a GPU.
        tile_size: tokens in a tile, the unit in which a step computes prompts.
        kv_cache_memory: size of the KV cache on each device: bytes, or text such as "512MiB". By default, on
            a CPU, enough for max_num_seqs sequences of max_model_len tokens, but at most 1 GiB; on a GPU, see
            gpu_memory_utilization.
        gpu_memory_utilization: the share of a GPU's memory for weights, programs and KV cache together.
        num_pages: size of the KV cache in pages instead of bytes, including the null page, which padding
            uses.
        logprobs_mode: which log probabilities of output tokens are returned. raw_logprobs: those of the raw
            logits; processed_logprobs: those of the distribution that the token is drawn from, after
            temperature, penalties, masks, top_k, top_p and min_p. Those of prompts are raw in any case.
        weight_updates: compile what `update_weights` runs when the engine starts, so that weights can be
            replaced while it runs, without compilations.
        enable_prefix_caching: keep the pages of prompts and outputs until their memory is needed. A request
            whose prompt begins with the same tokens, and has the same cache_salt, uses them instead of
            computing them again.
        swap_space: GiB of host memory, for each device, for cached pages that the device evicts, including
            those of preempted requests. A request fetches them back if that is predicted to be faster than
            computing them again. 0: off. Needs enable_prefix_caching.
        batch_invariant: a request's tokens and log probabilities are identical to the last bit, whatever else
            is in the batch, and whether or not it is preempted or found in the prefix cache. A step computes
            either all decode rows or a few prompt tiles; max_num_batched_tokens bounds the prompt tokens
            between two decode steps. Options that cannot guarantee this are rejected.
        policy: the order of waiting requests. fcfs: first come, first served; priority: lower priority values
            first, see priority_ageing; fair: equal shares by tokens, so the client that has been served least
            comes next, and first come, first served among one client's. `jengine serve` has fair by default,
            and fcfs with strategy latency or auto.
        priority_ageing: seconds of waiting that count as one level of priority, so that no request starves.
            With 0, waiting does not count.
        strategy: the goal of each step. throughput: the most tokens a second; latency: requests meet ttft_ms
            and tpot_ms; memory: the fewest preemptions, by admitting a request only when there are pages for
            what it is expected to generate; auto: one of these, by the load. May be changed while the engine
            runs.
        ttft_ms: target for the time from a request's arrival to its first token, in milliseconds. A request
            may set its own.
        tpot_ms: target for each further token, in milliseconds: the n-th is due n times tpot_ms after the
            first. A request may set its own.
        on_late: the treatment of requests that cannot meet their targets, with strategy latency. serve: they
            run after those that can; reject: they end at once, with finish_reason "abort" and stop_reason
            "rejected", and accepted requests meet their targets unless the machine becomes slower.
        batching: when waiting requests may start. continuous: at any time; dynamic: in batches of similar
            lengths, formed when max_num_seqs requests wait or batch_wait_ms have passed; static: the same,
            but a batch starts only when the previous one has ended.
        batch_wait_ms: with dynamic and static batching, the milliseconds that the first request of a batch
            waits for others.
        record_trace: a file that gets a line for each finished request, for `jengine simulate`: lengths,
            times, targets and keyed hashes that show which prompts share a prefix; no text and no tokens.
        overlap: dispatch each step before the tokens of the previous one are read, so that the device does
            not wait for the host.
        num_scheduler_steps: decode steps that run as one program, without the host in between: 1 or 8; auto:
            8 while no request waits and these steps take at most 100 ms. By default 1, and auto in an LLM on
            CPUs where no other option rules it out. Steps with prompts, masks, penalties, log probabilities
            or beams run singly. A new request may wait for two such bursts.
        speculative_config: speculative decoding, which changes no output. auto: each step verifies as many
            drafts as pay, according to what steps cost and how often drafts are right; drafts are what
            followed the same tokens earlier in the request or in outputs of the same client and cache_salt,
            and tokens that a grammar leaves no choice. An object sets method (ngram; suffix: drafts come from
            outputs of the same client and cache_salt too; draft_model: a smaller model drafts; mtp: the
            checkpoint's own head; eagle3: a trained head), num_speculative_tokens (most drafts of a sequence
            in a step, up to 15) and, for ngram, prompt_lookup_min and prompt_lookup_max (tokens that must be
            equal, and that are compared at most; by default 5), for draft_model and eagle3, model (given as
            `model` is); the guide to scheduling has the options of suffix. Models with recurrent states have
            up to 7 drafts of a sequence in a step, and on a GPU none with auto. none: off; None: the same.
        stream_interval: the fewest new tokens in each output of a stream, except its first and last output.
        kv_events_config: publishes in vLLM's format, over ZeroMQ, which pages the prefix cache holds, so that
            a router can send requests where their prefix is. An object with enable_kv_cache_events (true),
            endpoint, replay_endpoint, buffer_steps, hwm, max_queue_size and topic; the guide to fleets has
            their defaults. Needs the extra fleets and enable_prefix_caching. The events contain token ids.
        kv_transfer_config: keeps pages of the prefix cache outside the engine, and fetches them from there.
            An object with vLLM's fields kv_connector (disk: a folder; remote: a page server; sockets: engines
            that compute prompts for others), kv_role (kv_producer: keeps or serves pages; kv_consumer:
            fetches them; kv_both), kv_ip, kv_port, kv_buffer_size and kv_connector_extra_config; the guide to
            page stores has the rest. Needs swap_space, since pages pass through host memory.
        seed: for requests that do not set a seed.
        cache_dir: the folder of saved programs. By default jengine's folder in the user's cache.
        cache_max_size: the largest size of that folder, such as "20GiB"; above it, the least recently used
            programs are removed. By default 10GiB. With several processes, the limit applies to each of them.
        programs: a folder that `jengine compile` wrote for this model, these options and this device. The
            engine then compiles nothing. A dtype of auto and an unset num_pages take the folder's values.
        warm_up: when the engine is ready. progressive: when the few programs that can serve any request are
            ready; the others follow while it runs. all: when every program is ready.
        compile_threads: programs compiled at once, at most. By default 2 on a CPU, and on a GPU one for each
            core of the host, as far as cores and memory are free; at most cpu_threads.
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

    model: str = "demo"
    revision: str | None = None
    tokenizer: str | None = None
    chat_template: str | Path | None = None
    generation_config: Literal["auto", "vllm"] | None = "auto"
    dtype: Dtype = "auto"
    quantization: Quantization | CheckpointFormat | None = None
    quantization_group_size: int = 128
    calibration_data: str | Path | None = None
    kv_cache_dtype: Literal["auto", "int8", "fp8"] = "auto"
    embeddings: bool | None = None
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None
    lora_target_modules: list[str] | tuple[str, ...] | str | None = None
    limit_mm_per_prompt: dict[str, Any] | str | None = None
    mm_processor_kwargs: dict[str, Any] | str | None = None
    image_pool_rows: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    page_size: int | None = None
    tile_size: int = 64
    kv_cache_memory: int | str | None = None
    gpu_memory_utilization: float = 0.9
    num_pages: int | None = None
    logprobs_mode: LogprobsMode = "raw_logprobs"
    weight_updates: bool = False
    enable_prefix_caching: bool = True
    swap_space: float = 0.0
    batch_invariant: bool = False
    policy: Policy = "fcfs"
    priority_ageing: float = 60.0
    strategy: StrategyName = "throughput"
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    on_late: OnLate = "serve"
    batching: Batching = "continuous"
    batch_wait_ms: float = 50.0
    record_trace: str | Path | None = None
    overlap: bool = True
    num_scheduler_steps: int | str | None = None
    speculative_config: dict[str, Any] | str | None = "auto"
    stream_interval: int = 1
    kv_events_config: dict[str, Any] | str | None = None
    kv_transfer_config: dict[str, Any] | str | None = None
    seed: int = 0
    cache_dir: str | Path | None = None
    cache_max_size: int | str | None = None
    programs: str | Path | None = None
    warm_up: Literal["progressive", "all"] = "progressive"
    compile_threads: int | None = None
    cpu_threads: int | None = None
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    pipeline_parallel_size: int = 1
    pipeline_layers: str | None = None
    coordinator: str | None = None
    num_processes: int = 1
    process_id: int = 0

    @classmethod
    def of(cls, model: str, options: dict[str, Any]) -> EngineConfig:
        """Make a configuration from keyword options. Warns of options of vLLM that have no effect here.

        Raises:
            InvalidArgument: an unknown option, or a value out of range.
        """
        for name in ("mesh", "params"):
            if name in options:
                limit = (
                    "is no option of an engine's process: LLM, AsyncLLM and start_engine take it, in their"
                    " own process"
                )
                raise InvalidArgument(name, type(options[name]).__name__, limit)
        return cls(**{"model": model, **options})

    def __post_init__(self) -> None:
        for name in ("dtype", "kv_cache_dtype"):
            object.__setattr__(self, name, value_of(name, getattr(self, name)))
        check_whole("data_parallel_size", self.data_parallel_size, 1, 64)
        for name in ("tile_size", "stream_interval", "num_processes", *PARALLEL):
            check_whole(name, getattr(self, name), 1, None)
        for name in (
            "max_model_len",
            "page_size",
            "max_num_seqs",
            "max_num_batched_tokens",
            "compile_threads",
            "cpu_threads",
            "image_pool_rows",
        ):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), 1, None)
        if self.num_pages is not None:
            check_whole("num_pages", self.num_pages, 2, None)
        for name in (
            "model",
            "revision",
            "tokenizer",
            "chat_template",
            "cache_dir",
            "programs",
            "record_trace",
            "calibration_data",
        ):
            if not isinstance(getattr(self, name), str | Path | None):
                raise InvalidArgument(name, getattr(self, name), "must be text or a path")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise InvalidArgument("seed", self.seed, "must be a whole number")
        for name in (
            *("weight_updates", "enable_prefix_caching", "batch_invariant", "overlap", "enable_lora"),
            "enable_expert_parallel",
        ):
            if not isinstance(getattr(self, name), bool):
                raise InvalidArgument(name, getattr(self, name), "must be True or False")
        targets = target_modules(self.lora_target_modules)
        object.__setattr__(self, "lora_target_modules", targets)  # hashable
        check_lora_options(self.enable_lora, self.max_loras, self.max_lora_rank, self.max_cpu_loras, targets)
        image_limit(self.limit_mm_per_prompt)
        processing_options(self.mm_processor_kwargs)
        if self.embeddings is not None and not isinstance(self.embeddings, bool):
            raise InvalidArgument("embeddings", self.embeddings, "must be True, False or None")
        if (
            not isinstance(self.gpu_memory_utilization, int | float)
            or not 0.0 < self.gpu_memory_utilization <= 1.0
        ):
            raise InvalidArgument("gpu_memory_utilization", self.gpu_memory_utilization, "must be in (0, 1]")
        if self.dtype not in ("auto", *DTYPES):
            raise InvalidArgument("dtype", self.dtype, f"must be auto, {', '.join(DTYPES)}")
        if self.quantization not in (None, *get_args(Quantization), *get_args(CheckpointFormat)):
            limit = f"must be None, {', '.join(get_args(Quantization))}{HINTS['quantization']}"
            raise InvalidArgument("quantization", self.quantization, limit)
        check_four_bits(self.quantization, self.quantization_group_size, self.calibration_data)
        if self.logprobs_mode not in get_args(LogprobsMode):
            limit = f"must be one of {', '.join(get_args(LogprobsMode))}"
            raise InvalidArgument("logprobs_mode", self.logprobs_mode, limit)
        if self.kv_cache_dtype not in ("auto", "int8", "fp8"):
            raise InvalidArgument("kv_cache_dtype", self.kv_cache_dtype, "must be auto, int8 or fp8 (e4m3)")
        if self.generation_config not in ("auto", "vllm", None):
            raise InvalidArgument("generation_config", self.generation_config, "must be auto, vllm or None")
        for name, kinds in (
            ("policy", Policy),
            ("strategy", StrategyName),
            ("on_late", OnLate),
            ("batching", Batching),
        ):
            if getattr(self, name) not in get_args(kinds):
                raise InvalidArgument(
                    name, getattr(self, name), f"must be one of {', '.join(get_args(kinds))}"
                )
        for name in ("swap_space", "priority_ageing", "batch_wait_ms"):
            check_number(name, getattr(self, name), 0.0, math.inf, "a finite number, at least 0")
        check_targets(self.ttft_ms, self.tpot_ms)
        if self.strategy in ("latency", "auto") and self.batching != "continuous":
            raise InvalidArgument(
                "batching",
                self.batching,
                f"must be continuous with strategy={self.strategy}: others delay requests",
            )
        if self.strategy in ("latency", "auto") and self.batch_invariant:
            raise InvalidArgument(
                "batch_invariant",
                True,
                f"not with strategy={self.strategy}: it mixes prompts and rows in a step",
            )
        if (
            isinstance(self.num_scheduler_steps, str) and self.num_scheduler_steps.isdecimal()
        ):  # text where an option's file or flag gave it
            object.__setattr__(self, "num_scheduler_steps", int(self.num_scheduler_steps))
        if isinstance(self.num_scheduler_steps, bool) or self.num_scheduler_steps not in (
            None,
            1,
            BURST_STEPS,
            "auto",
        ):
            raise InvalidArgument(
                "num_scheduler_steps", self.num_scheduler_steps, f"must be 1, {BURST_STEPS} or auto"
            )
        if self.burst_steps > 1 and self.batch_invariant:
            raise InvalidArgument(
                "num_scheduler_steps",
                self.num_scheduler_steps,
                "must be 1 with batch_invariant: a burst is a different program",
            )
        if self.burst_steps > self.tile_size:
            limit = f"at least {BURST_STEPS} with num_scheduler_steps={self.num_scheduler_steps}"
            raise InvalidArgument("tile_size", self.tile_size, limit)
        self._check_speculation()
        layers = layer_numbers(self.pipeline_parallel_size, self.pipeline_layers)
        if not isinstance(self.pipeline_layers, str):
            object.__setattr__(self, "pipeline_layers", layers)  # hashable
        if self.page_events is not None and not self.enable_prefix_caching:
            limit = "must be True with kv_events_config: without it, no page is kept"
            raise InvalidArgument("enable_prefix_caching", False, limit)
        if self.kv_transfer is not None and not self.swap_space:
            limit = "must be above 0 with kv_transfer_config: pages pass through host memory"
            raise InvalidArgument("swap_space", self.swap_space, limit)
        if self.warm_up not in ("progressive", "all"):
            raise InvalidArgument("warm_up", self.warm_up, "must be progressive or all")
        if self.max_num_seqs is not None and self.max_num_batched_tokens is not None:
            check_budget(self.max_num_seqs, self.max_num_batched_tokens, self.tile_size)
        for name in ("kv_cache_memory", "cache_max_size"):
            parse_bytes(name, getattr(self, name))
        check_whole("process_id", self.process_id, 0, None)
        if self.process_id >= self.num_processes:
            raise InvalidArgument(
                "process_id", self.process_id, f"must be below num_processes={self.num_processes}"
            )
        if self.num_processes > 1 and not re.fullmatch(r".+:\d+", str(self.coordinator)):
            raise InvalidArgument(
                "coordinator", self.coordinator, "must be host:port, where process 0 listens"
            )

    def _check_speculation(self) -> None:
        how = Speculation.of(self.speculative_config)
        if how is not None and how.on_device and self.burst_steps > 1:
            limit = "must be 1 with a draft model or head: a burst drafts nothing"
            raise InvalidArgument("num_scheduler_steps", self.num_scheduler_steps, limit)

    @property
    def layout(self) -> Layout:
        """How the model lies over the devices."""
        ranks = self.data_parallel_size if self.enable_expert_parallel else 1
        tensor, experts = self.tensor_parallel_size, self.enable_expert_parallel
        stages = self.pipeline_parallel_size
        return Layout(stages=stages, data=ranks, tensor=tensor, expert_parallel=experts)

    @property
    def max_images(self) -> int:
        """The most images of a prompt."""
        return image_limit(self.limit_mm_per_prompt)

    @property
    def page_events(self) -> PageEvents | None:
        """Where events of pages are published; None: nowhere."""
        return PageEvents.of(self.kv_events_config)

    @property
    def kv_transfer(self) -> KvTransfer | None:
        """Where pages are kept outside the engine; None: nowhere."""
        return KvTransfer.of(self.kv_transfer_config)

    @property
    def image_processing(self) -> dict[str, Any]:
        """The fields of mm_processor_kwargs."""
        return processing_options(self.mm_processor_kwargs)

    @property
    def image_rows(self) -> int:
        """The most embeddings of an image, if the family reads images of any size."""
        return self.image_pool_rows or IMAGE_ROWS

    @property
    def lora(self) -> LoraLimits | None:
        """Limits of adapters; None: they are off."""
        targets = self.lora_target_modules
        return check_lora_options(
            self.enable_lora, self.max_loras, self.max_lora_rank, self.max_cpu_loras, targets
        )

    @property
    def draft_tokens(self) -> int:
        """Tokens that a draft model or a head proposes for a sequence in a step; 0: there is none."""
        how = Speculation.of(self.speculative_config)
        return how.num_speculative_tokens if how is not None and how.on_device else 0

    @property
    def burst_steps(self) -> int:
        """The number of decode steps in a burst; 1: there are no bursts."""
        single = self.num_scheduler_steps in (None, 1) or self.pipeline_parallel_size > 1
        return 1 if single else BURST_STEPS


def check_budget(max_num_seqs: int, max_num_batched_tokens: int, tile_size: int) -> None:
    """Check that a step has room for all decode rows and one tile of a prompt.

    Raises:
        InvalidArgument: max_num_batched_tokens is too small.
    """
    need = max_num_seqs + tile_size
    if max_num_batched_tokens < need:
        raise InvalidArgument(
            "max_num_batched_tokens",
            max_num_batched_tokens,
            f"must be at least max_num_seqs + tile_size = {need}",
        )
