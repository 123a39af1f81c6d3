"""What the router knows of one open request."""

from cluster.actors.open_requests import OpenRequest
from cluster.request import Request, RequestParams


def test_tokens_that_an_earlier_replica_sent_do_not_remain() -> None:
    request = Request("r", (1, 2, 3, 4, 5), RequestParams(max_tokens=10), resumed_tokens=3)
    open_request = OpenRequest(request)
    assert open_request.remaining_tokens == 7
    open_request.sent_tokens.extend([6, 7])
    assert open_request.remaining_tokens == 5
