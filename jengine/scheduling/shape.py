"""What a scheduler plans for: the cache on the devices, and the limits of its steps."""

from __future__ import annotations

from dataclasses import dataclass

from jengine.scheduling.step_plan import Windows
from jengine.table.program_table import SWAPS


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """The cache.

    Attributes:
        page_size: tokens in a page.
        num_pages: number of pages, the null page included.
        windows: for each of the model's cache groups with block tables, the number of tokens that a query
            attends to, its own included; earlier pages are released. None: all are kept.
        num_states: number of recurrent states, the null state and those for drafts included; 0: the model has
            none.
        draft_states: those for drafts.
        prefix_caching: whether prompts reuse the pages of earlier ones.
        host_pages: pages of host memory for evicted pages (see HostTier); 0: no host tier.
        staged: maximum number of pages in flight between device and host, in each direction.
    """

    page_size: int
    num_pages: int
    windows: Windows = (None,)
    num_states: int = 0
    draft_states: int = 0
    prefix_caching: bool = False
    host_pages: int = 0
    staged: int = SWAPS


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Limits of steps and sequences.

    Attributes:
        max_num_seqs: maximum number of running sequences.
        max_num_batched_tokens: maximum tokens in a step, decode rows and whole tiles together; at least
            max_num_seqs + one tile.
        max_model_len: maximum tokens of a sequence, prompt and output together.
        max_loras: places of adapters on the devices.
        stages: steps that run at once in a pipeline, each in one of its stages.
        through_host: see Cohorts.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_loras: int = 0
    stages: int = 1
    through_host: bool = False
