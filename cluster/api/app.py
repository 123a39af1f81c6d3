"""The public import path of the Serve application: `cluster.api.app:build_openai_app`."""

from cluster.api.serve.application import build_openai_app

__all__ = ["build_openai_app"]
