"""The tokenizer, incremental detokenization and stop strings."""
