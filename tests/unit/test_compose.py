"""Every command, flag and variable that docker-compose.yml uses exists, and its values are accepted."""

from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from embedq.cli import app
from embedq.option_base import ENV_PREFIX, Options
from embedq.options import ProduceOptions, WorkerOptions
from embedq.serve import ServeOptions

COMPOSE: dict[str, Any] = yaml.safe_load((Path(__file__).parents[2] / "docker-compose.yml").read_text())
SERVICES: dict[str, Any] = {
    name: service for name, service in COMPOSE["services"].items() if service["command"][0] == "embedq"
}
OPTIONS: dict[str, type[Options]] = {"worker": WorkerOptions, "serve": ServeOptions, "produce": ProduceOptions}


def with_defaults(value: str) -> str:
    """`${NAME:-default}` as compose reads it when the variable is not set."""
    return value.partition(":-")[2].rstrip("}") if value.startswith("${") else value


def variables(service: str) -> dict[str, str]:
    environment = SERVICES[service]["environment"]
    return {name: with_defaults(value) for name, value in environment.items() if name.startswith(ENV_PREFIX)}


def parse(service: str) -> tuple[str, dict[str, Any]]:
    """Parse the service's command as the shell would, and run nothing; raises click's usage errors."""
    _, name, *words = map(with_defaults, SERVICES[service]["command"])
    group: Any = typer.main.get_command(app)
    assert name in group.commands, f"`embedq {name}` is not a command"
    return name, group.commands[name].make_context(name, words).params


def test_the_compose_file_runs_embedq_four_times() -> None:
    assert set(SERVICES) == {"tokenizer", "embedder", "gateway", "producer"}


@pytest.mark.parametrize("service", SERVICES)
def test_every_command_flag_and_value_is_accepted(
    service: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in variables(service).items():
        monkeypatch.setenv(name, value)
    command, arguments = parse(service)
    fields = OPTIONS[command].model_fields
    given = {name: value for name, value in arguments.items() if name in fields and value not in (None, [], ())}
    options: Any = OPTIONS[command].load(given)
    assert options.redis_url == "redis://redis:6379/0"
    assert options.queue == "default"
    if command == "worker":
        assert options.model == variables(service)["EMBEDQ_MODEL"]


@pytest.mark.parametrize("service", SERVICES)
def test_every_variable_is_a_field_of_some_command(service: str) -> None:
    known = {ENV_PREFIX + name.upper() for options in OPTIONS.values() for name in options.model_fields}
    assert variables(service)
    assert set(variables(service)) <= known


def test_the_tokenizer_and_the_embedder_share_the_work() -> None:
    assert parse("tokenizer")[1]["roles"] == ["tokenizer"]
    assert parse("embedder")[1]["roles"] == ["embedder"]
    assert parse("embedder")[1]["gpus"] == ["0"]
