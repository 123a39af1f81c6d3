"""The kernels that are used beside FlashInfer's attention: those in Triton."""

from cluster.kernels.flashinfer.library import VERSION, FlashInfer
from cluster.kernels.triton_kernels import TritonKernels


class FlashInferKernels(TritonKernels):
    """`Kernels` in Triton, with FlashInfer for attention."""

    name = "flashinfer"

    def __init__(self, flashinfer: FlashInfer) -> None:
        super().__init__()
        self.flashinfer = flashinfer
        self.description = f"{self.description}; attention by FlashInfer {VERSION}, {flashinfer.variant}"
        self.numerics = f"flashinfer {VERSION}, {flashinfer.variant}"
