"""The operators of a step: `TorchKernels` is the reference implementation; others are in C (CPU) and Triton (GPU).

Each kernel has a folder with its sources; `c/` is shared by the C kernels. `build` compiles them, and `library` loads
the library for this CPU. C kernels give the same bits on every CPU with fused multiply-add; only products in bfloat16
also depend on the library's variant (`Library.variant`). In C kernels the bits of a row do not depend on the other rows
of the batch, so a row of a tree has the same bits as in plain decoding.
"""
