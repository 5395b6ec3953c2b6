"""Requests made up from the OpenAPI document, right ones and wrong ones: no answer is a 5xx, and each is what the document says."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from minisgl.server.openapi import ROUTES
from tests.server.player import playing_server

CASES = [
    pytest.param(method.upper(), path, is_right, id=f"{'right' if is_right else 'wrong'} {method} {path}")
    for method, path, body, *_ in ROUTES
    for is_right in ((True, False) if body else (True,))  # what takes no body cannot be asked wrongly
]


@pytest.fixture(scope="module")
def playing():
    with playing_server() as server:
        yield server


@pytest.fixture(scope="module")
def schema(playing):
    import schemathesis

    return schemathesis.openapi.from_dict(playing.client.get("/openapi.json").json())


def fuzz(playing, operation, is_right, num_examples):
    """Ask so many made-up requests, that fit the document or do not."""
    from schemathesis import checks
    from schemathesis.generation import GenerationMode

    wanted = [
        checks.not_a_server_error,
        checks.CHECKS.get_one("status_code_conformance"),
        checks.CHECKS.get_one("content_type_conformance"),
        checks.CHECKS.get_one("response_schema_conformance"),
    ]
    mode = GenerationMode.POSITIVE if is_right else GenerationMode.NEGATIVE

    @settings(max_examples=num_examples, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case):
        case.call_and_validate(base_url=str(playing.client.base_url), checks=wanted, timeout=10)

    ask()


@pytest.mark.parametrize(("method", "path", "is_right"), CASES)
def test_no_made_up_request_is_answered_with_a_5xx(playing, schema, method, path, is_right):
    fuzz(playing, schema[path][method], is_right, 5)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "path", "is_right"), CASES)
def test_none_of_many_made_up_requests_is_answered_with_a_5xx(playing, schema, method, path, is_right):
    fuzz(playing, schema[path][method], is_right, 300)
