"""The options of EngineConfig about the KV cache and its pages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from jengine.base.errors import InvalidArgument
from jengine.base.options import number, read_as, readable, size, whole
from jengine.core.kv_transfer import KvTransfer
from jengine.core.page_events import PageEvents
from jengine.vllm.translate import value_of

as_cache_dtype = read_as(partial(value_of, "kv_cache_dtype"))


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """The KV cache.

    Args:
        kv_cache_dtype: number format of the KV cache. int8 and fp8 (e4m3) have a scale for each token and kv
            head; auto: the same as dtype.
        page_size: tokens in a page of the KV cache. By default 16 on a CPU, 64 on a GPU.
        kv_cache_memory: size of the KV cache on each device: bytes, or text such as "512MiB". By default, on
            a CPU, enough for max_num_seqs sequences of max_model_len tokens, but at most 1 GiB; on a GPU, see
            gpu_memory_utilization.
        gpu_memory_utilization: the share of a GPU's memory for weights, programs and KV cache together.
        num_pages: size of the KV cache in pages instead of bytes, including the null page, which padding
            uses.
        enable_prefix_caching: keep the pages of prompts and outputs until their memory is needed. A request
            whose prompt begins with the same tokens, and has the same cache_salt, uses them instead of
            computing them again.
        swap_space: GiB of host memory, for each device, for cached pages that the device evicts, including
            those of preempted requests. A request fetches them back if that is predicted to be faster than
            computing them again. 0: off. Needs enable_prefix_caching.
        kv_events_config: publishes in vLLM's format, over ZeroMQ, which pages the prefix cache holds, so that
            a router can send requests where their prefix is. An object with enable_kv_cache_events (true),
            endpoint, replay_endpoint, buffer_steps, hwm, max_queue_size and topic; the guide to fleets has
            their defaults. Needs the extra fleets and enable_prefix_caching. The events contain token ids.
        kv_transfer_config: keeps pages of the prefix cache outside the engine, and fetches them from there.
            An object with vLLM's fields kv_connector (disk: a folder; remote: a page server; sockets: engines
            that compute prompts for others), kv_role (kv_producer: keeps or serves pages; kv_consumer:
            fetches them; kv_both), kv_ip, kv_port, kv_buffer_size and kv_connector_extra_config; the guide to
            page stores has the rest. Needs swap_space, since pages pass through host memory.
    """

    kv_cache_dtype: Annotated[Literal["auto", "int8", "fp8"], as_cache_dtype] = "auto"
    page_size: Annotated[int | None, whole(1)] = None
    kv_cache_memory: Annotated[int | str | None, size] = None
    gpu_memory_utilization: Annotated[float, number("in (0, 1]", 0.0, 1.0, open_low=True)] = 0.9
    num_pages: Annotated[int | None, whole(2)] = None
    enable_prefix_caching: bool = True
    swap_space: Annotated[float, number("a finite number, at least 0")] = 0.0
    kv_events_config: Annotated[dict[str, Any] | str | None, readable(PageEvents.of)] = None
    kv_transfer_config: Annotated[dict[str, Any] | str | None, readable(KvTransfer.of)] = None

    @property
    def page_events(self) -> PageEvents | None:
        """Where events of pages are published; None: nowhere."""
        return PageEvents.of(self.kv_events_config)

    @property
    def kv_transfer(self) -> KvTransfer | None:
        """Where pages are kept outside the engine; None: nowhere."""
        return KvTransfer.of(self.kv_transfer_config)


def check_cache(options: CacheOptions) -> None:
    """Raises InvalidArgument if options need others that are off."""
    if options.page_events is not None and not options.enable_prefix_caching:
        limit = "must be True with kv_events_config: without it, no page is kept"
        raise InvalidArgument("enable_prefix_caching", False, limit)
    if options.kv_transfer is not None and not options.swap_space:
        limit = "must be above 0 with kv_transfer_config: pages pass through host memory"
        raise InvalidArgument("swap_space", options.swap_space, limit)
