"""The names for users, which `__init__.py` imports on first use."""

from pallas_kernels.attention.dispatch import decode_work as decode_work
from pallas_kernels.attention.dispatch import paged_attention_decode as paged_attention_decode
from pallas_kernels.attention.dispatch import paged_attention_prefill as paged_attention_prefill
from pallas_kernels.attention.latent import latent_attention_decode as latent_attention_decode
from pallas_kernels.attention.latent import latent_attention_prefill as latent_attention_prefill
from pallas_kernels.attention.options import AttentionOptions as AttentionOptions
from pallas_kernels.cache.dispatch import copy_pages as copy_pages
from pallas_kernels.cache.dispatch import kv_write as kv_write
from pallas_kernels.cache.qkv import Qkv as Qkv
from pallas_kernels.elementwise.rotary import Rotation as Rotation

__version__: str
__all__: list[str]
