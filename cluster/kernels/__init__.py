"""The step's own operators, each beside the plain twin that it must equal: `TorchKernels`, and `CKernels` on a CPU.

A folder per kernel holds its source; `c/` is what the C ones share. `build` compiles them, `library` finds and loads
the one for this CPU. What they compute is the same on every CPU that has fused products, and a row's result does not
depend on the rows beside it: so a row of a tree has the bits that plain decoding gives.
"""
