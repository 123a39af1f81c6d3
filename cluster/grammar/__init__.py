"""Output held to a grammar: what is asked, what it means, which tokens it allows next; knows no engine."""
