"""Models on a hub such as huggingface.co: names are resolved to commits, and files are fetched into the cache.

The library `huggingface_hub` finds, downloads and caches. The code here decides which files are used and when they are
fetched, and explains failures.
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
