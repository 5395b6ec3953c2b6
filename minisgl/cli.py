"""The command line: reads flags, calls the program they ask for, turns errors into one line and an exit status.

    0    done
    1    it did not work: a process of ours died, a model could not be fetched, the answer broke off
    2    the request was wrong: a flag, a model that cannot be served, a port in use
    130  Ctrl-C (128 + the signal's number, likewise for others)

Loads torch only when a command needs it. Knows no protocol and no model. Called by the console script and `python -m minisgl`.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from minisgl import __version__, env
from minisgl.bench import doctor, offline
from minisgl.bench import serve as bench_serve
from minisgl.core import SamplingParams
from minisgl.distributed.info import DistributedInfo
from minisgl.engine.config import DEVICES, DTYPES, EngineConfig
from minisgl.errors import ConfigError, InvalidInputError, MinisglError
from minisgl.scheduler.config import CACHE_TYPES, SchedulerConfig
from minisgl.server.config_file import read_config_words
from minisgl.server.defaults import read_defaults
from minisgl.server.http_options import HttpOptions
from minisgl.server.options import ServerOptions

__all__ = ["build_parser", "main"]

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 1919
INTERRUPTED = 130
COMMANDS = ("serve", "chat", "generate", "bench", "doctor", "replay")
MODEL_HELP = "directory of a model, a .gguf file, or a name on the Hugging Face hub; without one, the embedded SmolLM2-135M-Instruct"


@dataclass(frozen=True)
class _Flag:
    """A flag that sets the field `name` of SchedulerConfig or HttpOptions, whose default it has."""

    name: str
    spellings: tuple[str, ...]
    help: str
    choices: tuple[str, ...] | None = None


ENGINE_FLAGS = (
    _Flag("dtype", ("--dtype",), "number type of weights and computation; auto: the checkpoint's on CUDA, float32 on a CPU", DTYPES),
    _Flag("device", ("--device",), "where to compute; auto: CUDA if there is a GPU, else the CPU", DEVICES),
    _Flag("max_seq_len", ("--max-seq-len",), "most tokens of one request, prompt and answer together; 0: the model's context"),
    _Flag("max_running_req", ("--max-running-requests",), "most requests that run at the same time"),
    _Flag("page_size", ("--page-size",), "tokens in one page of the KV pool; 0: 16 on a CPU, 64 on CUDA"),
    _Flag("num_pages", ("--num-pages",), "pages in the KV pool; 0: as many as the memory holds"),
    _Flag(
        "memory_ratio",
        ("--memory-ratio",),
        "share of the available memory, above 0 to 1, for weights and KV pool together; 0: 0.9 on CUDA, 0.3 on a CPU",
    ),
    _Flag("max_extend_tokens", ("--max-extend-tokens",), "most new tokens a step; 0: 8192 on CUDA (offline up to 16384), 256 on a CPU"),
    _Flag(
        "max_extend_tokens_beside_decode",
        ("--max-extend-tokens-beside-decode",),
        "most prompt tokens of one step while other answers are being written and wait for it; 0: 2048 on CUDA, 128 on a CPU; "
        "without a server as many as --max-extend-tokens",
    ),
    _Flag(
        "cuda_graph_max_bs",
        ("--cuda-graph-max-bs",),
        "largest decode step, in requests, that is a CUDA graph; 0: none is, nor a prefill step",
    ),
    _Flag("reserve_tokens", ("--reserve-tokens",), "tokens of answer for which room is kept when a further request is admitted"),
    _Flag("cache_type", ("--cache-type", "--cache"), "radix: equal beginnings of prompts are computed once; naive: never", CACHE_TYPES),
    _Flag(
        "attention_backend",
        ("--attention-backend", "--attn"),
        "attention, one name for all steps or two, PREFILL,DECODE: torch, triton, fa (FlashAttention), fi (FlashInfer); fa and fi take "
        "half types only, and decode steps with them or torch are no CUDA graphs; auto: triton on CUDA, torch on a CPU",
    ),
)
HTTP_FLAGS = (
    _Flag("max_body_bytes", ("--max-body-bytes",), "longest body of a request; a longer one is a 413"),
    _Flag("max_header_bytes", ("--max-header-bytes",), "longest headers of a request; longer ones are a 431"),
    _Flag("max_waiting_requests", ("--max-waiting-requests",), "most outputs that wait for their first token; a further one is a 429"),
    _Flag(
        "slow_reader_bytes", ("--slow-reader-bytes",), "most bytes that wait for a client that does not keep up; more, and it is dropped"
    ),
    _Flag(
        "slow_reader_timeout", ("--slow-reader-timeout",), "seconds after which a client is dropped that reads nothing of what waits for it"
    ),
    _Flag(
        "header_timeout", ("--header-timeout",), "seconds in which a request's headers and body must arrive; else the connection is closed"
    ),
    _Flag("request_timeout", ("--request-timeout",), "seconds in which a request must have been answered; else it ends with a 504"),
    _Flag("keep_alive_timeout", ("--keep-alive-timeout",), "seconds that an idle connection stays open"),
    _Flag("cors_origin", ("--cors-origin",), "origins, with commas between them, whose web pages may use the server; *: all; empty: none"),
)
PLAN_NAMES = ("dtype", "device", "max_seq_len", "max_running_req", "page_size", "num_pages", "memory_ratio")
PLAN_FLAGS = tuple(flag for flag in ENGINE_FLAGS if flag.name in PLAN_NAMES)
"""Those that a memory plan depends on."""


def build_parser() -> argparse.ArgumentParser:
    """The whole command line; tests/data/cli_flags.txt lists it."""
    parser = argparse.ArgumentParser("minisgl", description="A small serving engine for large language models.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"minisgl {__version__}", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", help="what to do; COMMAND --help tells more")
    _add_serve(commands)
    _add_chat(commands)
    _add_generate(commands)
    _add_bench(commands)
    _add_doctor(commands)
    _add_replay(commands)
    return parser


def _add_serve(commands: Any) -> None:
    text = "Serve a model over HTTP with the OpenAI protocol, until Ctrl-C."
    parser = commands.add_parser("serve", help="serve a model over HTTP", description=text, allow_abbrev=False)
    _add_serve_arguments(parser)
    parser.set_defaults(run=_serve)


def _add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model_argument", metavar="MODEL", nargs="?", help=MODEL_HELP)
    parser.add_argument("--model", "--model-path", dest="model", help="the same as MODEL")
    parser.add_argument(
        "--host", default=DEFAULT_HOST, help="address to listen on; 0.0.0.0 lets other machines in, and only --api-key asks who they are"
    )
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help="TCP port to listen on; 0: any free one, which is printed")
    parser.add_argument("--config", metavar="FILE", help="YAML file with settings, named as the flags; flags given here win")
    parser.add_argument("--served-model-name", metavar="NAME", help="what clients call the model; default: its name without its path")
    parser.add_argument(
        "--num-tokenizer",
        type=int,
        default=0,
        help="processes that only tokenize, at most 16; 0: one process turns text into ids and ids into text",
    )
    parser.add_argument(
        "--drain-timeout",
        type=float,
        default=ServerOptions.drain_timeout,
        help="seconds that running requests get to end after SIGTERM, while new ones are refused; 0: none (default: 5)",
    )
    parser.add_argument(
        "--step-timeout",
        type=float,
        default=ServerOptions.step_timeout,
        help="seconds after which a step of the model counts as stuck in /health/progress; 0: 60 on a CPU, 10 on CUDA",
    )
    parser.add_argument(
        "--record",
        metavar="FILE",
        help="new file for all that is heard and scheduled, prompts included; `minisgl replay FILE` runs it again without the model",
    )
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help="what clients must show, but for /health; others on this machine see it here: better $MINISGL_API_KEY",
    )
    parser.add_argument("--shell", action="store_true", help="serve nobody: chat with the model on this terminal, as `minisgl chat` does")
    _add_config_flags(parser.add_argument_group("limits"), HTTP_FLAGS, HttpOptions)
    _add_engine_flags(parser)


def _add_chat(commands: Any) -> None:
    text = "Hold a conversation on the terminal, with an OpenAI-compatible server or with a model that is computed in this process."
    parser = commands.add_parser("chat", help="chat on the terminal", description=text, allow_abbrev=False)
    target = f"http://… or https://… of a server; else a model: {MODEL_HELP}"
    parser.add_argument("model_argument", metavar="URL|MODEL", nargs="?", help=target)
    parser.add_argument(
        "--model", "--model-path", dest="model", help="the same as MODEL; with a URL, the model's name at the server (default: its first)"
    )
    parser.add_argument("--api-key", metavar="KEY", help="with a URL: what the server wants to see (default: $MINISGL_API_KEY)")
    parser.add_argument(
        "--history",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep what is typed for the next time, in a file that only you can read (default: on)",
    )
    _add_engine_flags(parser)
    parser.set_defaults(run=_chat)


def _add_generate(commands: Any) -> None:
    text = "Answer one question on the terminal, as it is being written, with the speed at the end."
    parser = commands.add_parser("generate", help="answer one question on the terminal", description=text, allow_abbrev=False)
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", default="-", help="the question; - or nothing: read it from standard input")
    parser.add_argument("--model", "--model-path", dest="model", help=MODEL_HELP)
    parser.add_argument("--max-tokens", type=int, default=256, help="most tokens of the answer")
    _add_engine_flags(parser)
    parser.set_defaults(run=_generate)


def _add_bench(commands: Any) -> None:
    text = "Measure how fast models are served here."
    parser = commands.add_parser("bench", help="measure the speed", description=text, allow_abbrev=False)
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="WHAT", help="what to measure; WHAT --help tells more")
    text = "Output tokens per second of the offline class: 256 requests of 100 to 1,024 tokens in and out, drawn from seed 0."
    parser = kinds.add_parser("offline", help="the offline class on a fixed workload", description=text, allow_abbrev=False)
    parser.add_argument("--model", "--model-path", dest="model", help=MODEL_HELP)
    offline.add_arguments(parser)
    _add_engine_flags(parser)
    parser.set_defaults(run=_bench_offline)
    text = "Load on any OpenAI-compatible server over HTTP: tokens per second, time to the first token, gaps between tokens, errors."
    parser = kinds.add_parser("serve", help="a server, over HTTP", description=text, allow_abbrev=False)
    bench_serve.add_arguments(parser)
    parser.set_defaults(run=bench_serve.main)


def _add_doctor(commands: Any) -> None:
    text = "Tell what is installed, what this machine can compute on, and how a model would fit its memory. Loads no weights."
    parser = commands.add_parser("doctor", help="tell what can be used here", description=text, allow_abbrev=False)
    doctor.add_arguments(parser)
    _add_config_flags(parser.add_argument_group("engine"), PLAN_FLAGS)
    parser.set_defaults(run=_doctor)


def _add_replay(commands: Any) -> None:
    text = "Run a recording of `minisgl serve --record` again, without model or GPU; every digest must come out as recorded."
    parser = commands.add_parser("replay", help="run a recording again and compare", description=text, allow_abbrev=False)
    parser.add_argument("file", metavar="FILE", help="what `minisgl serve --record FILE` wrote")
    parser.set_defaults(run=_replay)


def _add_config_flags(group: Any, flags: Sequence[_Flag], config: type = SchedulerConfig) -> None:
    for flag in flags:
        default = getattr(config, flag.name)
        kind = None if isinstance(default, str) else type(default)
        options: dict[str, Any] = {"type": kind} if kind else {}
        text = f"{flag.help} (default: {default})" if default != "" else flag.help
        group.add_argument(*flag.spellings, dest=flag.name, default=default, choices=flag.choices, help=text, **options)


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--tp", "--tensor-parallel-size", dest="tp", type=int, default=1, help="ranks: processes that share the model (default: 1)"
    )
    _add_config_flags(group, ENGINE_FLAGS)
    group.add_argument(
        "--overlap",
        dest="overlap",
        action=argparse.BooleanOptionalAction,
        default=SchedulerConfig.overlap,
        help="plan a step while the one before it runs; without this flag, where the device computes asynchronously",
    )
    group.add_argument(
        "--dummy-weight",
        dest="use_dummy_weight",
        action="store_true",
        help="read no weight file and fill the weights from --seed: for measuring, the text is noise",
    )
    group.add_argument("--seed", type=int, default=SchedulerConfig.seed, help="seed of the dummy weights (default: 0)")


def main(argv: Sequence[str] | None = None, *, default_command: str | None = None) -> int:
    """Run one command line; `default_command` stands in where none is named. Returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if default_command is not None and (not words or words[0] not in (*COMMANDS, "-h", "--help", "--version")):
        words.insert(0, default_command)
    arguments = build_parser().parse_args(words)
    try:
        if getattr(arguments, "config", None) is not None:
            arguments = _with_config_file(arguments, words)
        run: Callable[[argparse.Namespace], int] = arguments.run
        return run(arguments)
    except MinisglError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, InvalidInputError) else 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # whoever read our output has stopped; Python's last flush must not fail on it again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _with_config_file(arguments: argparse.Namespace, words: list[str]) -> argparse.Namespace:
    """The arguments with the file's settings put before the command line's own, which therefore win."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    _add_serve_arguments(parser)
    settings = read_config_words(arguments.config, parser)
    if arguments.model_argument is not None:
        settings.pop("model", None)
    return build_parser().parse_args([words[0], *(word for setting in settings.values() for word in setting), *words[1:]])


def _engine_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The engine flags as fields of SchedulerConfig."""
    names = [*(flag.name for flag in ENGINE_FLAGS), "overlap", "use_dummy_weight", "seed"]
    return {name: getattr(arguments, name) for name in names}


def _llm_settings(arguments: argparse.Namespace, model: str | None) -> dict[str, Any]:
    """What `LLM` is to be told. A wrong flag is told here, before torch is loaded."""
    settings = {"model_path": model, **_engine_settings(arguments)}
    SchedulerConfig(tp_info=DistributedInfo(0, arguments.tp), **settings)
    return {"tp_size": arguments.tp, **settings}


def _configure_logging(level: int) -> None:
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)


def _named_model(arguments: argparse.Namespace) -> str | None:
    """MODEL, or --model, which is the same."""
    model: str | None = arguments.model_argument if arguments.model is None else arguments.model
    if arguments.model_argument not in (None, model):
        raise ConfigError(f"MODEL {arguments.model_argument!r} and --model {model!r} found; name one model")
    return model


def _refuse_without_effect(arguments: argparse.Namespace, names: Sequence[str], why: str) -> None:
    """Raise ConfigError for one of the flags that has been given a value of its own."""
    defaults = build_parser().parse_args([arguments.command])
    spellings = {flag.name: flag.spellings[0] for flag in ENGINE_FLAGS} | {"use_dummy_weight": "--dummy-weight"}
    for name in names:
        if getattr(arguments, name) != getattr(defaults, name):
            raise ConfigError(f"{spellings.get(name, '--' + name.replace('_', '-'))} has no effect {why}; leave it out")


def _serve(arguments: argparse.Namespace) -> int:
    if arguments.shell:
        known = {*_engine_settings(arguments), "tp", "command", "run", "shell", "config", "model", "model_argument"}
        others = set(vars(arguments)) - known
        _refuse_without_effect(arguments, sorted(others), "with --shell, which serves nobody")
        return _chat_locally(arguments, has_history=True)
    from minisgl.server.launcher import serve

    _configure_logging(logging.INFO)
    model = _named_model(arguments)
    ranks = DistributedInfo(0, arguments.tp)
    settings = _engine_settings(arguments)
    record = None if arguments.record is None else os.path.abspath(arguments.record)
    scheduler = SchedulerConfig(model_path=model, tp_info=ranks, record=record, backend_create_detokenizer_link=False, **settings)
    names = ("host", "port", "served_model_name", "num_tokenizer", "drain_timeout", "step_timeout")
    key = env.api_key() if arguments.api_key is None else arguments.api_key
    http = HttpOptions(api_key=key, **{flag.name: getattr(arguments, flag.name) for flag in HTTP_FLAGS})
    return serve(ServerOptions(scheduler, **{name: getattr(arguments, name) for name in names}, http=http), say=_say)


def _chat(arguments: argparse.Namespace) -> int:
    from minisgl.chat import openai_server, program

    url = arguments.model_argument
    if url is None or not openai_server.is_url(url):
        _refuse_without_effect(arguments, ["api_key"], "without a URL")
        return _chat_locally(arguments, has_history=arguments.history)
    _refuse_without_effect(arguments, ["tp", *_engine_settings(arguments)], "with a URL: the server has its own settings")
    key = env.api_key() if arguments.api_key is None else arguments.api_key
    connect = partial(openai_server.connect, url, arguments.model, key)
    return program.main(connect, url, env.chat_history() if arguments.history else None)


def _chat_locally(arguments: argparse.Namespace, *, has_history: bool) -> int:
    from minisgl.chat import backend, program

    model = _named_model(arguments)
    settings = _llm_settings(arguments, model)
    name = "the embedded model" if model is None else model

    def make() -> backend.LocalBackend:
        from minisgl.llm import LLM

        llm = LLM(**settings)
        return backend.LocalBackend(llm, name, read_defaults(str(llm.config.model_path)).values)

    _configure_logging(logging.WARNING)
    return program.main(make, name, env.chat_history() if has_history else None)


def _say(line: str) -> None:
    print(line, flush=True)


def _generate(arguments: argparse.Namespace) -> int:
    params = SamplingParams(max_tokens=arguments.max_tokens)
    settings = _llm_settings(arguments, arguments.model)
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    if not prompt.strip():
        raise ConfigError("PROMPT: nothing found; give a question, or - and the question on standard input")
    from minisgl.llm import LLM

    _configure_logging(logging.WARNING)
    with LLM(**settings) as llm:
        start, num_tokens, error = time.monotonic(), 0, None
        for chunk in llm.stream([{"role": "user", "content": prompt}], params):
            print(chunk.text, end="", flush=True)
            num_tokens += len(chunk.token_ids)
            if chunk.result is not None:
                error = chunk.result.error
        seconds = time.monotonic() - start
    if error is not None:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print()
    print(f"[{num_tokens} tokens in {seconds:.1f} s, {num_tokens / seconds:.1f} tokens/s]", file=sys.stderr)
    return 0


def _bench_offline(arguments: argparse.Namespace) -> int:
    settings = _llm_settings(arguments, arguments.model)
    from minisgl.llm import LLM

    _configure_logging(logging.WARNING)
    return offline.main(arguments, partial(LLM, **settings))


def _doctor(arguments: argparse.Namespace) -> int:
    settings = {name: getattr(arguments, name) for name in PLAN_NAMES}
    config = EngineConfig(model_path=arguments.model, **settings)
    _configure_logging(logging.WARNING)
    return doctor.main(config if arguments.model is not None else None)


def _replay(arguments: argparse.Namespace) -> int:
    from minisgl.replay import replay

    _configure_logging(logging.WARNING)
    outcome = replay(arguments.file)
    turns = f"{outcome.num_turns} turns of {outcome.num_ranks} rank{'s' if outcome.num_ranks > 1 else ''}"
    if outcome.difference is not None:
        found = outcome.difference
        print(f"error: step {found.step} differs in {found.field}: {found.text}", file=sys.stderr)
        print(f"{outcome.num_steps} steps before it are as recorded", file=sys.stderr)
        return 1
    print(f"replayed {outcome.num_steps} steps in {turns}: every digest is as recorded")
    if not outcome.is_complete:
        print("the recording breaks off here: the server was killed, or could not write on")
    return 0
