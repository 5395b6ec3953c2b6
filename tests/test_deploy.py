"""What deploy/ says is true of the code: flags, port, health route, time-outs and files exist. The images are not built here."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

from minisgl.cli import build_parser, main
from minisgl.server.openapi import ROUTES
from tests.tools.cli_flags import parsers

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
PAGE = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
DOCKERFILES = ("Dockerfile.cpu", "Dockerfile.cuda")
PORT = build_parser().parse_args(["serve"]).port
SECRET = re.compile(r"key|token|secret|password", re.IGNORECASE)
AFTER_DRAIN_S = 10
"""What the server may need when the drain is over: docs/operations.md."""


def instructions(name: str) -> list[tuple[str, str]]:
    """(word, rest) of each instruction of a Dockerfile, continued lines joined."""
    lines = [line for line in (DEPLOY / name).read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in joined if line.strip())]


def last_stage(name: str) -> list[tuple[str, str]]:
    every = instructions(name)
    return every[max(place for place, (word, _) in enumerate(every) if word == "FROM") :]


def value(name: str, word: str) -> str:
    """What the last stage says behind `word`, which stands there once."""
    found = [rest for each, rest in last_stage(name) if each == word]
    assert len(found) == 1, (word, found)
    return found[0]


def served(words: list[str], monkeypatch):
    """The options of the server that `minisgl words` would start."""
    started = []
    monkeypatch.setattr("minisgl.server.launcher.serve", lambda options, say: started.append(options) or 0)
    assert main(words) == 0
    return started[0]


@pytest.fixture(scope="module")
def compose() -> dict:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str
    parser.read(DEPLOY / "minisgl.service", encoding="utf-8")
    return parser


# ---- Dockerfiles ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DOCKERFILES)
def test_the_command_is_a_server_that_can_be_reached_on_the_exposed_port(name, monkeypatch):
    words = json.loads(value(name, "ENTRYPOINT"))
    assert words[0] == "minisgl"
    options = served(words[1:], monkeypatch)
    assert (options.host, options.port) == ("0.0.0.0", PORT)
    assert value(name, "EXPOSE") == str(PORT)
    assert options.scheduler.device == ("cuda" if name.endswith("cuda") else "auto")
    moved = served([*words[1:], str(ROOT), "--port", "8000"], monkeypatch)  # what `docker run IMAGE ...` adds
    assert (moved.scheduler.model_path, moved.port) == (str(ROOT), 8000)


@pytest.mark.parametrize("name", DOCKERFILES)
def test_health_is_asked_for_at_a_route_that_exists_and_a_port_that_is_listened_on(name):
    check = value(name, "HEALTHCHECK")
    command = json.loads(check[check.index("[") :])
    port, path = re.search(r"http://127\.0\.0\.1:(\d+)(/[\w/]+)", command[-1]).groups()
    assert (int(port), path) == (PORT, "/health/ready")
    assert path in [route for _, route, *_ in ROUTES]
    compile(command[-1], name, "exec")


@pytest.mark.parametrize("name", DOCKERFILES)
def test_the_server_is_not_root_and_its_state_is_a_volume_that_it_owns(name):
    user = value(name, "USER")
    uid = user.partition(":")[0]
    assert int(uid) > 0
    home = re.search(r"--home-dir (\S+)", " ".join(rest for _, rest in last_stage(name)))[1]
    assert any(word == "RUN" and f"useradd --uid {uid} " in rest for word, rest in last_stage(name))
    assert json.loads(value(name, "VOLUME")) == [home]
    places = dict(pair.split("=", 1) for pair in value(name, "ENV").split())
    assert {places["MINISGL_CACHE"], places["HF_HOME"]} == {f"{home}/cache", f"{home}/huggingface"}


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_is_made_of_named_versions_and_files_that_exist_and_holds_no_secret(name):
    ignored = (DEPLOY / f"{name}.dockerignore").read_text(encoding="utf-8").splitlines()
    let_through = [line[1:] for line in ignored if line.startswith("!")]
    assert "*" in ignored
    assert all((ROOT / each).exists() for each in let_through)
    for word, rest in instructions(name):
        if word == "FROM":
            assert re.fullmatch(r"\S+:[\d.]+\S*( AS \w+)?", rest), rest
        if word in ("ENV", "ARG"):
            assert [pair for pair in rest.split() if SECRET.search(pair.partition("=")[0])] == []
        if word == "COPY" and not rest.startswith("--from"):
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert any(fnmatch(source, each) or source.startswith(f"{each}/") for each in let_through), source


def test_the_two_images_differ_only_where_the_device_does():
    cpu, cuda = (last_stage(name) for name in DOCKERFILES)
    assert {word for word, rest in set(cpu) ^ set(cuda)} == {"RUN", "ENV", "ENTRYPOINT"}


# ---- compose ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_a_composed_server_has_its_image_its_flags_and_time_to_end(name, compose, monkeypatch):
    service = compose["services"][name]
    dockerfile = service["build"]["dockerfile"]
    assert (DEPLOY / service["build"]["context"] / dockerfile).is_file()
    command = [re.sub(r"\$\{[^}]*\}", "model", word) for word in service["command"]]
    options = served([*json.loads(value(Path(dockerfile).name, "ENTRYPOINT"))[1:], *command], monkeypatch)
    assert float(service["stop_grace_period"].removesuffix("s")) >= options.drain_timeout + AFTER_DRAIN_S
    assert options.scheduler.model_path.startswith("/models/")
    assert any(volume.endswith(":/models:ro") for volume in service["volumes"])
    assert f"state:{json.loads(value(Path(dockerfile).name, 'VOLUME'))[0]}" in service["volumes"]
    assert "state" in compose["volumes"]


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_a_composed_server_wants_a_key_and_has_no_more_rights_than_it_needs(name, compose):
    service = compose["services"][name]
    assert service["environment"]["MINISGL_API_KEY"].startswith("${MINISGL_API_KEY:?")
    assert [port for port in service["ports"] if not port.startswith("${MINISGL_BIND:-127.0.0.1}:")] == []
    assert service["ports"][0].endswith(f":{PORT}")
    assert (service["read_only"], service["cap_drop"], service["init"]) == (True, ["ALL"], True)
    assert "/tmp" in service["tmpfs"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert service["profiles"] == [name]


# ---- systemd ----------------------------------------------------------------------------------------------------------------------


def test_the_unit_starts_a_server_with_the_settings_beside_it_and_lets_it_end(unit, monkeypatch):
    service = unit["Service"]
    program, *words = shlex.split(service["ExecStart"])
    assert program.endswith("/bin/minisgl")
    place = words.index("--config") + 1
    assert Path(words[place]).name == "minisgl.yaml"
    words[place] = str(DEPLOY / "minisgl.yaml")
    options = served(words, monkeypatch)
    assert (options.host, options.port) == ("127.0.0.1", PORT)
    assert int(service["TimeoutStopSec"]) >= options.drain_timeout + AFTER_DRAIN_S
    assert (service["KillSignal"], service["KillMode"]) == ("SIGTERM", "mixed")
    assert service["Restart"] == "on-failure"
    assert set(service["SuccessExitStatus"].split()) == {str(128 + number) for number in (15, 2)}
    assert service["RestartPreventExitStatus"] == "2"  # minisgl.cli: the request was wrong


def test_the_unit_keeps_models_in_its_state_directory_and_can_write_nowhere_else(unit):
    service = unit["Service"]
    places = dict(pair.split("=", 1) for pair in service["Environment"].split())
    state = f"%S/{service['StateDirectory']}"
    assert all(place == state or place.startswith(f"{state}/") for place in places.values())
    assert {"MINISGL_CACHE", "HF_HOME"} <= set(places)
    assert (service["ProtectSystem"], service["ProtectHome"], service["PrivateTmp"]) == ("strict", "yes", "yes")
    assert (service["DynamicUser"], service["NoNewPrivileges"], service["CapabilityBoundingSet"]) == ("yes", "yes", "")
    assert not any(SECRET.search(name) for name in places)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_understands_the_unit(tmp_path):
    text = (DEPLOY / "minisgl.service").read_text(encoding="utf-8")
    (tmp_path / "minisgl.service").write_text(text.replace("/opt/minisgl/bin/minisgl", "/bin/true"), encoding="utf-8")
    command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / "minisgl.service")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    found = [line for line in done.stderr.splitlines() if "minisgl" in line]
    assert (found, done.returncode) == ([], 0), done.stderr


# ---- the page ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(path.name for path in DEPLOY.iterdir() if not path.name.endswith(".dockerignore")))
def test_the_page_tells_of_each_file(path):
    assert f"](../deploy/{path})" in PAGE


def test_flags_and_routes_on_the_page_exist():
    flags = {spelling for parser in parsers(build_parser()) for action in parser._actions for spelling in action.option_strings}
    of_docker = {"--init", "--rm", "--time", "--memory", "--cpus", "--cpuset-cpus", "--gpus", "--shm-size", "--profile", "--build", "--now"}
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", PAGE)) - of_docker <= flags
    routes = set(re.findall(r"`(/(?:health|metrics)[\w/]*)`", PAGE))
    assert len(routes) > 3
    assert routes <= {path for _, path, *_ in ROUTES}
