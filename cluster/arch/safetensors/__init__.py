"""Names, dtypes and shapes of a checkpoint's tensors, read from file headers; no tensor data is loaded."""
