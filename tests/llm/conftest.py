"""One offline engine for all tests that need nothing special, and a prompt or two."""

from __future__ import annotations

import pytest

from minisgl.llm import LLM

SMALL = {"device": "cpu", "num_pages": 256, "max_running_req": 16}
"""Settings of a small engine for a tiny model."""


@pytest.fixture(scope="package")
def llm(tiny_models):
    with LLM(tiny_models("llama"), **SMALL) as engine:
        yield engine


@pytest.fixture
def make_llm(tiny_models):
    """`make_llm(**settings)` is a small engine of its own, closed at the end of the test; `model=` names another tiny model."""
    engines = []

    def make(model="llama", **settings):
        engines.append(LLM(tiny_models(model) if isinstance(model, str) else model, **(SMALL | settings)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
