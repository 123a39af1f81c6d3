"""Middleware in front of Serve's HTTP proxy. Serve loads it by the import path `cluster.api.proxy:middlewares`."""

from cluster.api.proxy.middleware import middlewares

__all__ = ["middlewares"]
