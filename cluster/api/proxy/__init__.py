"""Middleware in front of Serve's HTTP proxy. `cluster.api.proxy:middlewares` is the import path that Serve is given."""

from cluster.api.proxy.middleware import middlewares

__all__ = ["middlewares"]
