"""Requests through an engine of this process, step by step."""

from collections import deque
from collections.abc import Generator, Sequence

from cluster.engine.engine import Engine
from cluster.request import Request, SequenceOutput


def steps(
    engine: Engine, requests: Sequence[Request], at_once: int | None = None
) -> Generator[tuple[SequenceOutput, ...], None, None]:
    """Yield the outputs of each step until all `requests` have ended. Closing the generator, or a failure, aborts those
    that have not.

    The engine holds at most `at_once` of the requests, running and waiting; None hands it all of them. Its scheduler
    looks at every waiting request in every step, so a long list is handed over piece by piece.

    Raises:
        ValueError: a request cannot be served; none is started then.
    """
    for request in requests:
        engine.check(request)
    most = len(requests) if at_once is None else at_once
    coming, held = deque(requests), set[str]()
    try:
        while coming or engine.has_work:
            while coming and len(held) < most:
                request = coming.popleft()
                engine.submit(request)
                held.add(request.request_id)
            outputs = engine.step().outputs
            held.difference_update(output.request_id for output in outputs if output.finish_reason is not None)
            yield outputs
    finally:
        for request_id in held:
            engine.abort(request_id)


def complete(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    """Run `requests` together to their end and return the tokens of each.

    Raises:
        ValueError: as `steps`.
    """
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for outputs in steps(engine, requests):
        for output in outputs:
            tokens[output.request_id] += output.token_ids
    return list(tokens.values())
