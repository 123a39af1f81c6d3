"""Programs of Triton, in its interpreter and compiled without a GPU."""
