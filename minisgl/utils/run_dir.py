"""Where the sockets of one server live: a private directory per user, and who may claim a path in it.

Knows paths and unix sockets, nothing of ZeroMQ or of messages. The configuration derives addresses from it, the queues claim paths
through it, whoever needs a file in the run directory makes the directory with `make_private_directory`.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import stat
from pathlib import Path

from minisgl.errors import ConfigError

__all__ = ["MAX_SOCKET_PATH_BYTES", "claim_socket_path", "ipc_address", "ipc_path", "make_private_directory", "run_directory"]

MAX_SOCKET_PATH_BYTES = 107
"""The kernel keeps 108 bytes for a unix socket's path, the closing zero included."""

_SCHEME = "ipc://"


def run_directory() -> Path:
    """The directory of this user's sockets. Depends on the user alone; deliberately short, and not made here."""
    return Path(f"/tmp/minisgl-{os.geteuid()}")


def ipc_address(suffix: str, name: str) -> str:
    """The address of the socket called `name` of the server that `suffix` stands for. Touches no disk.

    Raises ConfigError for a suffix that cannot be part of a file name or makes the path longer than a socket's may be.
    """
    if not re.fullmatch(r"[A-Za-z0-9._=-]+", suffix):
        raise ConfigError(f"_unique_suffix: {suffix!r} found; letters, digits and . _ = - are allowed, at least one")
    path = run_directory() / f"{suffix}.{name}"
    excess = len(os.fsencode(path)) - MAX_SOCKET_PATH_BYTES
    if excess > 0:
        raise ConfigError(
            f"_unique_suffix: {len(suffix)} characters found, {len(suffix) - excess} are allowed: "
            f"a socket's path has at most {MAX_SOCKET_PATH_BYTES} bytes; shorten _unique_suffix"
        )
    return f"{_SCHEME}{path}"


def ipc_path(address: str) -> Path:
    """The file behind an address. Raises ConfigError unless it is `ipc://` and an absolute path of at most 107 bytes."""
    path = address.removeprefix(_SCHEME)
    if path == address or not path.startswith("/") or "\0" in path:
        raise ConfigError(f"address {address!r} found; ipc:// and an absolute path is allowed, sockets never leave this machine")
    num_bytes = len(os.fsencode(path))
    if num_bytes > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(f"address {address!r} has a path of {num_bytes} bytes; {MAX_SOCKET_PATH_BYTES} are allowed, shorten it")
    return Path(path)


def make_private_directory(path: Path) -> None:
    """Make `path` (mode 0700) if it is missing. Raises ConfigError if what is there is no directory, not ours, or open to others."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"{path} is a link or a file; minisgl keeps its sockets there in a directory of its own, remove it")
    if found.st_uid != os.geteuid():
        raise ConfigError(f"{path} belongs to user {found.st_uid}; user {os.geteuid()} must own it, have it removed")
    if found.st_mode & 0o077:
        raise ConfigError(f"{path} has mode {stat.S_IMODE(found.st_mode):04o}; others must have no access, run `chmod 700 {path}`")


def claim_socket_path(path: Path) -> None:
    """Make the directory of `path` and see that the path may be bound. ZeroMQ replaces the socket that a dead process left.

    Raises ConfigError if a live server listens there (ZeroMQ would take its clients away without a word) or if the file is no socket.
    """
    make_private_directory(path.parent)
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"{path} exists and is no socket; remove it or choose another _unique_suffix")
    if _has_listener(path):
        raise ConfigError(f"a live server listens on {path}; stop it or choose another _unique_suffix")


def _has_listener(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        status = probe.connect_ex(str(path))
    return status not in (errno.ECONNREFUSED, errno.ENOENT)
