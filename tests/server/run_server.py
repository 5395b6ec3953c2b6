"""`minisgl serve` with another scheduler process: run_server.py MODEL_DIR SUFFIX SCHEDULER_MODULE OPTIONS. Started by tests.

OPTIONS is a JSON object: `tp` is the number of ranks, `record` a file, `config` and `http` hold fields of SchedulerConfig and HttpOptions,
the others are fields of ServerOptions.
"""

from __future__ import annotations

import json
import logging
import sys

from minisgl.distributed import DistributedInfo
from minisgl.errors import MinisglError
from minisgl.scheduler.config import SchedulerConfig
from minisgl.server.http_options import HttpOptions
from minisgl.server.launcher import CHILD_MODULES, serve
from minisgl.server.options import ServerOptions

TOKENIZER = "tests.server.tallied_tokenizer_process"


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(model_dir: str, suffix: str, scheduler_module: str, options_json: str) -> int:
    logging.basicConfig(level=logging.INFO)
    settings = json.loads(options_json)
    own = {"tp_info": DistributedInfo(0, settings.pop("tp", 1)), "record": settings.pop("record", None), **settings.pop("config", {})}
    config = SchedulerConfig(model_path=model_dir, _unique_suffix=suffix, backend_create_detokenizer_link=False, **own)
    options = ServerOptions(config, port=0, http=HttpOptions(**settings.pop("http", {})), **settings)
    try:
        return serve(options, say=say, child_modules={**CHILD_MODULES, "tokenizer": TOKENIZER, "scheduler": scheduler_module})
    except MinisglError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
