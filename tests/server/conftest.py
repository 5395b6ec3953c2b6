"""Fixtures of the server's tests."""

from __future__ import annotations

import pytest

from tests.server.local_server import local_server


@pytest.fixture(scope="module")
def server():
    """API and tokenizer, with the test as the scheduler; shared by a module's tests, each of which leaves nothing behind."""
    with local_server() as running:
        yield running
