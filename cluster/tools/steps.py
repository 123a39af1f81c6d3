"""Requests through an engine of this process, step by step."""

from collections.abc import Generator, Sequence

from cluster.engine.engine import Engine
from cluster.request import Request, RequestOutput


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
