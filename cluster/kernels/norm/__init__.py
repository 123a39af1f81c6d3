"""RMS norm with a residual sum, in C and Triton."""
