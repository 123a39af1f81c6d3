"""The accepted path of a tree, in C and Triton."""
