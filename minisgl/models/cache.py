"""Directories that are made once and then only read, in the cache: fetched and converted models.

Knows nothing of models. Called by `embedded` and `resolve`.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

__all__ = ["make_once"]

logger = logging.getLogger(__name__)


def make_once(target: Path, build: Callable[[Path], None]) -> Path:
    """Return the directory `target`, made by `build(aside)` if it is not there: written aside, renamed when whole.

    Several processes may ask at once: one builds, the others wait for it. A failed or killed build leaves no `target`; the next one
    clears what it left. Raises what `build` raises.
    """
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{target.name}.making-"
    with FileLock(target.parent / f".{target.name}.lock"):
        if target.is_dir():
            return target
        for leftover in target.parent.glob(f"{prefix}*"):
            logger.info("removing %s, left by a build that did not end", leftover)
            shutil.rmtree(leftover, ignore_errors=True)
        aside = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
        try:
            build(aside)
            aside.rename(target)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return target
