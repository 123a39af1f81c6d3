"""Models on a hub such as huggingface.co: names are resolved to commits, and files are fetched into the cache.

The library `huggingface_hub` finds, downloads and caches. The code here decides which files are used and when they are
fetched, and explains failures.
"""

from cluster.arch.hub.names import HubModel, hub_model, name_of
from cluster.arch.hub.settings import fetch, fetch_configs, folder_of, header_folders, hub_models, is_pinned, pin

__all__ = [
    "HubModel",
    "fetch",
    "fetch_configs",
    "folder_of",
    "header_folders",
    "hub_model",
    "hub_models",
    "is_pinned",
    "name_of",
    "pin",
]
