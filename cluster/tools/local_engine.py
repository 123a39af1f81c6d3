"""An engine of this process, and requests through it step by step."""

import argparse
from collections.abc import Generator, Sequence

from cluster.config import EngineConfig
from cluster.engine.build import build_engine
from cluster.engine.engine import Engine
from cluster.request import Request, RequestOutput
from cluster.tools.engine_flags import engine_settings


def engine_of(args: argparse.Namespace, model: str) -> Engine:
    """The engine that the flags ask for, with the target in folder `model` or of that name on a hub.

    Raises:
        ConfigError: a setting cannot be honoured.
    """
    return build_engine(EngineConfig.from_kwargs(engine_settings(args, model)))


def steps(engine: Engine, requests: Sequence[Request]) -> Generator[tuple[RequestOutput, ...], None, None]:
    """What each step gives, until all `requests` have ended. Closing it, or a failure, aborts those that have not.

    Raises:
        ValueError: a request cannot be served; none is started then.
    """
    for request in requests:
        engine.check(request)
    try:
        for request in requests:
            engine.submit(request)
        while engine.has_work:
            yield engine.step().outputs
    finally:
        for request in requests:
            engine.abort(request.request_id)


def complete(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    """Run `requests` together to their end; the tokens of each.

    Raises:
        ValueError: as `steps`.
    """
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for outputs in steps(engine, requests):
        for output in outputs:
            tokens[output.request_id] += output.token_ids
    return list(tokens.values())
