"""Device kernels, each beside the torch twin it must equal."""
