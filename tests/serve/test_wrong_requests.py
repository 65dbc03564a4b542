"""Whatever a request holds, its answer is no server error, and the next one is served."""

from collections import Counter

from tests.serve.conftest import NAME, address_of, answered
from tests.serve.wrong_requests import is_server_error, wrong_requests
from transformers_falcon_spec.serve.service import Server


def test_wrong_requests_are_never_answered_with_a_server_error(server: Server) -> None:
    statuses: Counter[int] = Counter()
    faults = []
    for request in wrong_requests(150, seed=1):
        status, body = request.send(address_of(server))
        statuses[status] += 1
        if is_server_error(request, status, body):
            faults.append(f"{status} {request}: {body[:200]!r}")

    assert faults == []
    assert {200, 400, 404, 405} <= statuses.keys()
    assert statuses[400] > 100
    assert answered(server, "/v1/completions", {"model": NAME, "prompt": "The sum is", "max_tokens": 2})[0] == 200
