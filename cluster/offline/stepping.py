"""Run requests through an engine of this process, step by step."""

from collections import deque
from collections.abc import Generator, Sequence

from cluster.engine.engine import Engine
from cluster.request import Request, SequenceOutput


def steps(
    engine: Engine, requests: Sequence[Request], max_in_engine: int | None = None
) -> Generator[tuple[SequenceOutput, ...], None, None]:
    """Yield the outputs of each step until all `requests` have finished. If the generator is closed or an error occurs,
    all submitted requests that have not finished are aborted.

    The engine holds at most `max_in_engine` requests, running and waiting. If `max_in_engine` is None, all are
    submitted at once. The scheduler looks at every waiting request in every step, so a long list should be submitted in
    parts.

    Raises:
        ValueError: a request cannot be served. In that case no request is started.
    """
    for request in requests:
        engine.check(request)
    limit = len(requests) if max_in_engine is None else max_in_engine
    pending, in_engine = deque(requests), set[str]()
    try:
        while pending or engine.has_work:
            while pending and len(in_engine) < limit:
                request = pending.popleft()
                engine.submit(request)
                in_engine.add(request.request_id)
            outputs = engine.step().outputs
            in_engine.difference_update(output.request_id for output in outputs if output.finish_reason is not None)
            yield outputs
    finally:
        for request_id in in_engine:
            engine.abort(request_id)


def complete(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    """Run `requests` as one batch until all have finished, and return the tokens of each.

    Raises:
        ValueError: a request cannot be served.
    """
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for outputs in steps(engine, requests):
        for output in outputs:
            tokens[output.request_id] += output.token_ids
    return list(tokens.values())
