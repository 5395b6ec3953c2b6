"""The OpenAPI document, made of the Structs that requests and answers are decoded into and encoded from. Called by the app."""

from __future__ import annotations

from typing import Any

import msgspec

from minisgl.server import answers, protocol
from minisgl.server.http_errors import ErrorBody

__all__ = ["ROUTES", "openapi_document"]

ROUTES: tuple[tuple[str, str, type | None, tuple[type, ...], str], ...] = (
    ("post", "/v1/chat/completions", protocol.ChatRequest, (answers.Answer, answers.Chunk), "Answer a chat"),
    ("post", "/v1/completions", protocol.CompletionRequest, (answers.Completion, answers.Completion), "Complete prompts"),
    ("post", "/generate", protocol.GenerateRequest, (answers.Generation, answers.GenerationChunk), "Complete one prompt, with token ids"),
    ("post", "/tokenize", protocol.TokenizeRequest, (answers.TokensAnswer,), "Token ids of a prompt or a chat"),
    ("post", "/detokenize", protocol.DetokenizeRequest, (answers.TextAnswer,), "Text of token ids"),
    ("post", "/flush_cache", None, (answers.Status,), "Empty the prefix cache; 409 while requests run"),
    ("post", "/abort", protocol.AbortRequest, (answers.AbortAnswer,), "End a request by its id"),
    ("get", "/v1/models", None, (answers.ModelList,), "The served models"),
    ("get", "/v1/models/{model}", None, (answers.Model,), "One served model"),
    ("get", "/version", None, (answers.Version,), "The server's version"),
    ("get", "/metrics", None, (), "Counters and times, as text for Prometheus"),
    ("get", "/health", None, (answers.Status,), "Whether all processes live; 503 while the model is loaded"),
    ("get", "/health/ready", None, (answers.Status,), "Whether requests are taken"),
    ("get", "/health/progress", None, (answers.Progress,), "Whether no step of the model is stuck"),
)
"""Method, path, body, answer (and, if there is a second, each event of a stream; if there is none, it is plain text), summary."""
REF = "#/components/schemas/{name}"
ERRORS = {"4XX": "The request cannot be served", "5XX": "The server cannot serve it now"}


def openapi_document(version: str) -> dict[str, Any]:
    """An OpenAPI 3.1 document."""
    types = {kind for _, _, body, replies, _ in ROUTES for kind in (body, *replies) if kind is not None} | {ErrorBody}
    ordered = sorted(types, key=lambda kind: kind.__name__)
    _, components = msgspec.json.schema_components(ordered, ref_template=REF)
    paths: dict[str, Any] = {}
    for method, path, body, replies, summary in ROUTES:
        paths.setdefault(path, {})[method] = _operation(path, body, replies, summary)
    return {
        "openapi": "3.1.0",
        "info": {"title": "minisgl", "version": version},
        "paths": paths,
        "components": {"schemas": components},
    }


def _operation(path: str, body: type | None, replies: tuple[type, ...], summary: str) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": _schema(replies[0])} if replies else {"text/plain": {"schema": {"type": "string"}}}
    if len(replies) > 1:
        event = {"type": "string", "contentMediaType": "application/json", "contentSchema": _schema(replies[1])["schema"]}
        data = {"anyOf": [event, {"const": "[DONE]"}]}
        content["text/event-stream"] = {"schema": {"type": "object", "properties": {"data": data}, "required": ["data"]}}
    responses = {"200": {"description": summary, "content": content}}
    responses |= {status: {"description": text, "content": {"application/json": _schema(ErrorBody)}} for status, text in ERRORS.items()}
    operation: dict[str, Any] = {"summary": summary, "responses": responses}
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": _schema(body)}}
    if "{model}" in path:
        operation["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
    return operation


def _schema(kind: type) -> dict[str, Any]:
    return {"schema": {"$ref": REF.format(name=kind.__name__)}}
