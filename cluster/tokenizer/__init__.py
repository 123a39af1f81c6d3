"""Text to tokens and back: a tokenizer folder, incremental detokenization, stop strings."""
