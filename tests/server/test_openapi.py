"""The OpenAPI document: it names every route and every field that the server decodes, and nothing else."""

from __future__ import annotations

import re

from minisgl.server.protocol import ChatRequest, CompletionRequest, GenerateRequest


def document(server):
    response = server.client.get("/openapi.json")
    assert (response.status_code, response.headers["content-type"]) == (200, "application/json")
    return response.json()


def test_every_path_answers_and_its_method_is_the_only_one(server):
    for path, methods in document(server)["paths"].items():
        for method in ("GET", "POST"):
            if path == "/flush_cache":
                continue  # waits for the scheduler
            status = server.client.request(method, path.replace("{model}", "byte-model"), content=b"{").status_code
            wanted = {("get", "GET"): 200, ("post", "POST"): 400}.get((next(iter(methods)), method), 405)
            assert status == wanted, (method, path)


def test_every_reference_leads_somewhere(server):
    found = document(server)
    schemas = found["components"]["schemas"]
    references = re.findall(r"#/components/schemas/(\w+)", str(found))
    assert set(references) <= set(schemas)
    assert "ErrorBody" in references


def test_request_schemas_have_the_fields_that_are_decoded(server):
    schemas = document(server)["components"]["schemas"]
    for kind in (ChatRequest, CompletionRequest, GenerateRequest):
        schema = schemas[kind.__name__]
        assert set(schema["properties"]) == set(kind.__struct_fields__)
        assert schema["additionalProperties"] is False
    assert schemas["ChatRequest"]["required"] == ["messages"]
