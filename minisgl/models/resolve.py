"""What a user names as the model to a model directory on this machine: a directory, a GGUF file, a hub id, or nothing at all.

Knows nothing of what is in the directory. Called by the launcher, the offline class and the command line.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from functools import partial
from pathlib import Path

from minisgl.env import cache_dir
from minisgl.errors import ConfigError, FetchError
from minisgl.models.cache import make_once
from minisgl.models.embedded import embedded_model_path

__all__ = ["resolve_model"]

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
CONVERSION_VERSION = "1"


def resolve_model(model: str | None) -> Path:
    """The directory of `model`: None is the embedded model, a directory is itself, a *.gguf file is converted once into the cache, and
    anything else is an id on the Hugging Face hub.

    Raises ConfigError for a path that does not exist, FetchError if nothing can be fetched, ModelFormatError for a GGUF file that
    cannot be served.
    """
    if model is None:
        return embedded_model_path()
    path = Path(os.path.expanduser(model))  # unlike Path.expanduser, os.path leaves an unknown user's ~ as it is, and takes
    if model and os.path.isdir(path):  # a name too long for the system for one that is not there
        return path
    if os.path.isfile(path):
        return _converted(path)
    is_path = model.startswith((".", "/", "~")) or model.endswith(".gguf") or not HUB_ID.fullmatch(model)
    if is_path:
        raise ConfigError(
            f"model: {model[:200]!r} found, and there is no such file or directory; name a model directory, a .gguf file or a hub id"
        )
    return _from_hub(model)


def _converted(path: Path) -> Path:
    if path.suffix != ".gguf":
        raise ConfigError(f"model: the file {path} found; a model directory, a .gguf file or a hub id is wanted")
    from minisgl.models.convert import convert_gguf

    path = path.resolve()
    state = path.stat()
    identity = f"{CONVERSION_VERSION} {path} {state.st_size} {state.st_mtime_ns}"
    target = cache_dir() / "gguf" / f"{path.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    return make_once(target, partial(convert_gguf, path, progress=sys.stderr.isatty()))


def _from_hub(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(model, allow_patterns=HUB_FILES))
    except (HFValidationError, OSError) as error:  # the library's network and repository errors are OSErrors
        cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FetchError(
            f"model {model!r} is no directory here and could not be fetched from the Hugging Face hub: {cause}\n"
            "Check the name, the network and, for a gated model, HF_TOKEN; or name a model directory or a .gguf file."
        ) from error
