"""The routes around the chat, and the one shape of errors."""

from __future__ import annotations

import pytest

from tests.server.local_server import MODEL


def test_health(server):
    response = server.client.get("/health")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})


def test_models(server):
    response = server.client.get("/v1/models")
    body = response.json()
    assert response.headers["content-type"] == "application/json"
    assert isinstance(body["data"][0].pop("created"), int)
    assert body == {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "minisgl"}]}


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "not_found"),
        ("GET", "/v1/models/", 501, "not_implemented"),
        ("POST", "/v1/chat/completions/", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/health", 405, "method_not_allowed"),
        ("POST", "/v1/completions", 501, "not_implemented"),
        ("GET", f"/v1/models/{MODEL}", 501, "not_implemented"),
        ("POST", "/generate", 501, "not_implemented"),
        ("POST", "/tokenize", 501, "not_implemented"),
        ("GET", "/health/ready", 501, "not_implemented"),
    ],
)
def test_what_is_not_there_says_so_in_the_one_shape(server, method, path, status, code):
    response = server.client.request(method, path)
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
