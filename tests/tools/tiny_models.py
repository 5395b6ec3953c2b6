"""A cache of tiny random-weight models, each built by `make_tiny.py` when it is first asked for.

Called by the `tiny_models` fixture. A model is written aside and renamed when whole, so test runs may share the cache.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

NAMES = ("llama", "qwen2", "qwen3", "qwen3-moe", "mistral")
MAKE_TINY = Path(__file__).with_name("make_tiny.py")
SEEDS = {"llama": 2, "qwen2": 2, "qwen3": 2, "qwen3-moe": 3, "mistral": 2}
"""Seeds tried per model. With the first two qwen3-moe says ids beyond the tokenizer, which transformers samples and minisgl never does."""
BUILD_TIMEOUT = 600
"""Seconds; one model takes about 18 on an idle core."""


def default_root() -> Path:
    """`MINISGL_TEST_CACHE`, else a folder in the user's cache named after all that the models' bytes depend on."""
    if root := os.environ.get("MINISGL_TEST_CACHE"):
        return Path(root)
    # The tokenizers are trained on Python's own help texts, so the Python version counts too.
    libraries = [f"{name} {version(name)}" for name in ("torch", "transformers", "tokenizers")]
    text = "\n".join([MAKE_TINY.read_text(encoding="utf-8"), str(SEEDS), *libraries, platform.python_version()])
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "minisgl-tests" / hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class TinyModels:
    """name -> directory of the tiny model: `tiny_models("llama")`. Its `expected.json` holds the reference run."""

    root: Path

    def __call__(self, name: str) -> Path:
        """Raises ValueError for a name outside NAMES, RuntimeError with the program's output if the model cannot be built."""
        if name not in NAMES:
            raise ValueError(f"tiny model {name!r} found; one of {', '.join(NAMES)} is allowed")
        path = self.root / f"tiny-{name}"
        if not path.is_dir():
            self._build(name, path)
        return path

    def _build(self, name: str, path: Path) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.root, prefix=f".{name}-") as aside:
            command = [sys.executable, str(MAKE_TINY), aside, "--only", name, "--seeds", str(SEEDS[name]), "--no-mutations"]
            done = subprocess.run(
                command, env={**os.environ, "NT": "1"}, capture_output=True, text=True, timeout=BUILD_TIMEOUT, check=False
            )
            if done.returncode != 0:
                raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
            try:
                (Path(aside) / path.name).rename(path)
            except OSError:
                if not path.is_dir():  # else another run was faster; its model is the same
                    raise
