"""Requests through an engine of this process, step by step."""

from collections.abc import Iterator, Sequence

from cluster.engine.engine import Engine
from cluster.request import Request, RequestOutput


def outputs(engine: Engine, requests: Sequence[Request]) -> Iterator[RequestOutput]:
    """What every step gives `requests`, until all have ended. Closing it, or a failure, aborts those that have not.

    Raises:
        ValueError: a request cannot be served; none is started then.
    """
    for request in requests:
        engine.check(request)
    try:
        for request in requests:
            engine.submit(request)
        while engine.has_work:
            yield from engine.step().outputs
    finally:
        for request in requests:
            engine.abort(request.request_id)
