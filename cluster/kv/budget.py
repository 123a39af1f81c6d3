"""How many pages fit the configured memory."""

from cluster.config import ConfigError, EngineConfig


def page_count(config: EngineConfig, token_bytes: int, context_length: int, window: int) -> int:
    """Pages of one rank, the sink not counted.

    `token_bytes` is what one token costs in the pools of all runners together. Without `max_total_tokens` the budget
    is `kv_cache_gb`, but never more than every running request at full context could use.

    Raises:
        ConfigError: not even a short request would fit.
    """
    most = config.max_running_requests * (context_length + window)
    tokens = config.max_total_tokens or min(most, int(config.kv_cache_gb * 1e9) // token_bytes)
    pages = tokens // config.page_size
    if pages * config.page_size <= window + 1:
        raise ConfigError(
            f"max_total_tokens gives {pages} pages of {config.page_size} tokens, too few for a window of {window} "
            "tokens and a prompt; raise max_total_tokens or kv_cache_gb"
        )
    return pages
