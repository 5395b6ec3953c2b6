"""The exceptions that minisgl raises on purpose, as one tree.

    MinisglError
    ├── InvalidInputError (ValueError)    something a user, a file or a peer supplied is wrong
    │   ├── ConfigError                   a flag, a setting or a combination of them
    │   ├── ModelFormatError              a model directory, a config, a tensor or a tokenizer we cannot serve
    │   └── RequestError                  one request; carries the HTTP status and the machine-readable code
    ├── MissingDependencyError (ImportError)  an optional library is not installed; carries the install line
    ├── FetchError (OSError)              a model could not be fetched
    ├── ClosedError (RuntimeError)        an object was used after `close()`
    ├── WorkerError (RuntimeError)        a process of ours died or could not start
    └── IntegrityError (RuntimeError)     our own ledger does not add up: always a bug of minisgl

A message says what was found, what is allowed and what to change. Whoever builds a message for a user raises one of these;
`assert` is for our own mistakes and never looks at request data. This module imports nothing of ours.
"""

from __future__ import annotations

__all__ = [
    "ClosedError",
    "ConfigError",
    "FetchError",
    "IntegrityError",
    "InvalidInputError",
    "MinisglError",
    "MissingDependencyError",
    "ModelFormatError",
    "RequestError",
    "WorkerError",
]


class MinisglError(Exception):
    """Base of everything that minisgl raises on purpose."""


class InvalidInputError(MinisglError, ValueError):
    """Something a user, a file or a peer supplied is wrong."""


class ConfigError(InvalidInputError):
    """A flag or a setting has a value we cannot honour, or two of them exclude each other."""


class ModelFormatError(InvalidInputError):
    """A model directory, a configuration, a weight file or a tokenizer that cannot be served as it is."""


class RequestError(InvalidInputError):
    """One request cannot be served.

    `status` is the HTTP status, `code` the short machine-readable reason, `param` the field at fault (None if no single one).
    """

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request", param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


class MissingDependencyError(MinisglError, ImportError):
    """An optional library is missing; the message carries the install line."""


class FetchError(MinisglError, OSError):
    """A model could not be fetched from where it should come from."""


class ClosedError(MinisglError, RuntimeError):
    """An object was used after it had been closed."""


class WorkerError(MinisglError, RuntimeError):
    """A process that belongs to a server or an engine died or could not be started."""


class IntegrityError(MinisglError, RuntimeError):
    """Pages, locks or request states contradict each other. Always a bug of minisgl, never of a user."""
