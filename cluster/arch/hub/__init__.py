"""Models of a hub such as huggingface.co: names resolved to commits, and files fetched into the cache.

The library `huggingface_hub` finds, downloads and caches. The code here decides which files are served and when they
are fetched, and says what to do when they cannot be.
"""

from cluster.arch.hub.names import HubModel, hub_model, name_of
from cluster.arch.hub.settings import describe, fetch, folder_of, hub_models, is_pinned, outlined, pin

__all__ = [
    "HubModel",
    "describe",
    "fetch",
    "folder_of",
    "hub_model",
    "hub_models",
    "is_pinned",
    "name_of",
    "outlined",
    "pin",
]
