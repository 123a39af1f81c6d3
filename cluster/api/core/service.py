"""Interfaces of what the REST layer uses: engine, model, tokenizer, metrics. This module does not import Ray."""

from typing import Protocol

from cluster.actors.messages import EngineClient
from cluster.api.core.constraints import OutputConstraint
from cluster.api.core.limits import ModelInfo
from cluster.api.core.tokenizer import ChatTokenizer
from cluster.observability.metrics import ServingMetrics


class GrammarCompiler(Protocol):
    """Compiles the grammars that constrain outputs; implemented by `cluster.api.core.grammars.Grammars`."""

    async def compile(self, constraint: OutputConstraint) -> str:
        """Return the compiled grammar of a constraint. If this is impossible, raise an `ApiError` that names
        `constraint.field`.
        """
        ...


class ServedModel(Protocol):
    """What is needed to read and validate a request: model, tokenizer, grammar compiler."""

    @property
    def model(self) -> ModelInfo:
        """The model that is served."""
        ...

    @property
    def tokenizer(self) -> ChatTokenizer | None:
        """The tokenizer, or None if the model's folder has no tokenizer. Prompts must then be token ids."""
        ...

    @property
    def grammars(self) -> GrammarCompiler:
        """The compiler of the grammars that constrain outputs."""
        ...


class Service(ServedModel, Protocol):
    """Everything the routes use. The routes read the properties on every call, so their values may change after the app
    is made.
    """

    @property
    def engine(self) -> EngineClient:
        """The client through which the routes use the engine: one gang (the ranks of one replica), or several."""
        ...

    @property
    def metrics(self) -> ServingMetrics:
        """The metrics of this replica."""
        ...

    async def metric_samples(self) -> list[bytes]:
        """Return the metrics of all replicas and ranks, as one JSON text for each process (a registry sample, see
        `cluster.observability.metrics`).
        """
        ...

    async def metrics_page(self) -> bytes:
        """Return the metrics of all replicas and ranks as one text in Prometheus's format."""
        ...
