"""`minisgl serve` with another scheduler process: run_server.py MODEL_DIR SUFFIX SCHEDULER_MODULE. Started by the lifecycle tests."""

from __future__ import annotations

import logging
import sys

from minisgl.errors import MinisglError
from minisgl.scheduler.config import SchedulerConfig
from minisgl.server.launcher import CHILD_MODULES, serve
from minisgl.server.options import ServerOptions


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(model_dir: str, suffix: str, scheduler_module: str) -> int:
    logging.basicConfig(level=logging.INFO)
    config = SchedulerConfig(model_path=model_dir, _unique_suffix=suffix, backend_create_detokenizer_link=False)
    options = ServerOptions(config, port=0)
    try:
        return serve(options, say=say, child_modules={**CHILD_MODULES, "scheduler": scheduler_module})
    except MinisglError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
