"""The names for users, which `__init__.py` loads on first use. `jengine.spi` has those for the service."""

from jengine.api.async_llm import AsyncLLM as AsyncLLM
from jengine.api.chat import chat_prompt as chat_prompt
from jengine.api.embeddings import EmbeddingOutput as EmbeddingOutput
from jengine.api.embeddings import EmbeddingRequestOutput as EmbeddingRequestOutput
from jengine.api.embeddings import ScoringOutput as ScoringOutput
from jengine.api.embeddings import ScoringRequestOutput as ScoringRequestOutput
from jengine.api.forward import Forward as Forward
from jengine.api.llm import LLM as LLM
from jengine.api.llm import LLMEngine as LLMEngine
from jengine.api.parity import Parity as Parity
from jengine.api.parity import ReferenceOutput as ReferenceOutput
from jengine.api.parity import verify as verify
from jengine.api.prompts import EmbedsPrompt as EmbedsPrompt
from jengine.api.prompts import TextPrompt as TextPrompt
from jengine.api.prompts import TokensPrompt as TokensPrompt
from jengine.api.request_handle import RequestHandle as RequestHandle
from jengine.base.errors import EngineDead as EngineDead
from jengine.base.errors import InvalidArgument as InvalidArgument
from jengine.base.errors import JengineError as JengineError
from jengine.base.errors import ModelError as ModelError
from jengine.base.errors import OutOfMemory as OutOfMemory
from jengine.base.errors import PromptTooLong as PromptTooLong
from jengine.checkpoints.layouts import trainer_weights as trainer_weights
from jengine.core.beam_outputs import BeamSearchOutput as BeamSearchOutput
from jengine.core.beam_outputs import BeamSearchSequence as BeamSearchSequence
from jengine.core.beam_params import BeamSearchParams as BeamSearchParams
from jengine.core.config import EngineConfig as EngineConfig
from jengine.core.lora import LoraInfo as LoraInfo
from jengine.core.lora import LoRARequest as LoRARequest
from jengine.core.pooling import PoolingParams as PoolingParams
from jengine.core.request import CompletionOutput as CompletionOutput
from jengine.core.request import Logprob as Logprob
from jengine.core.request import RequestOutput as RequestOutput
from jengine.core.request import SamplingParams as SamplingParams
from jengine.core.structured_outputs import StructuredOutputs as StructuredOutputs
from jengine.core.updates import Load as Load
from jengine.engine.start import follow as follow
from jengine.insight.explanations.explain import Explanation as Explanation
from jengine.insight.explanations.explain import explain as explain
from jengine.insight.profiling.data import Profile as Profile
from jengine.insight.profiling.data import ProfileOptions as ProfileOptions
from jengine.insight.recording.trace import Trace as Trace
from jengine.scheduling.forecasts.forecast import Prediction as Prediction
from jengine.text.tokenizer import Tokenizer as Tokenizer
from jengine.version import __version__ as __version__

# names of vLLM
AsyncEngineArgs = EngineConfig
AsyncLLMEngine = AsyncLLM
EngineArgs = EngineConfig
