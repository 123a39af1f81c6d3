from cluster.offline.llm import LLM as LLM
from cluster.offline.outputs import CompletionOutput as CompletionOutput
from cluster.offline.outputs import Logprob as Logprob
from cluster.offline.outputs import RequestOutput as RequestOutput
from cluster.offline.sampling_params import SamplingParams as SamplingParams
from cluster.offline.sampling_params import StructuredOutputsParams as StructuredOutputsParams

__version__: str
