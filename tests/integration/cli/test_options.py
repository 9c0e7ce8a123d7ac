"""Flags, EMBEDQ_* variables and embedq.toml are three doors to the same fields, and none takes a wrong value."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import typer.main
from commands import Finished, documents, in_process, write_corpus
from pydantic.fields import FieldInfo

from embedq.cli import app
from embedq.dataset.options import CompactOptions, ExportOptions, InspectOptions, SearchOptions
from embedq.option_base import ALL_OPTIONS, Options
from embedq.options import (
    BenchOptions,
    CancelOptions,
    DoctorOptions,
    ErrorsOptions,
    ModelOptions,
    ProduceOptions,
    ResultsOptions,
    RetryOptions,
    RunOptions,
    StatusOptions,
    WorkerOptions,
)
from embedq.serve import ServeOptions

GROUP: Any = typer.main.get_command(app)
COMMANDS: dict[str, type[Options]] = {
    "run": RunOptions,
    "produce": ProduceOptions,
    "worker": WorkerOptions,
    "serve": ServeOptions,
    "status": StatusOptions,
    "results": ResultsOptions,
    "errors": ErrorsOptions,
    "retry": RetryOptions,
    "cancel": CancelOptions,
    "model inspect": ModelOptions,
    "doctor": DoctorOptions,
    "inspect": InspectOptions,
    "search": SearchOptions,
    "export": ExportOptions,
    "compact": CompactOptions,
    "bench": BenchOptions,
}
FIELDS = [(command, name) for command, options in COMMANDS.items() for name in options.model_fields]
ARGUMENTS = {
    "run": "c.jsonl",
    "produce": "c.jsonl",
    "results": "some-run",
    "errors": "some-run",
    "retry": "some-run",
    "cancel": "some-run",
    "inspect": "some-directory",
    "search": "some-directory",
    "export": "some-directory",
    "compact": "some-directory",
}
"""What a command cannot do without."""


def plain(annotation: Any) -> Iterator[Any]:
    """The types of a field without None, Annotated and unions."""
    if isinstance(annotation, types.UnionType) or (get_origin(annotation) is not None and annotation is not Literal):
        if get_origin(annotation) in (Literal, tuple):
            yield annotation
        else:
            for member in get_args(annotation):
                yield from plain(member)
    elif annotation is not type(None):
        yield annotation


def example(field: FieldInfo, name: str) -> tuple[str, Any]:
    """A valid value that is not the default: as text, and as TOML would give it."""
    if name == "redis_url":
        return "redis://elsewhere:1/2", "redis://elsewhere:1/2"
    if name == "roles":
        return "tokenizer", ["tokenizer"]
    if name == "template":
        return "{title}: {body}", "{title}: {body}"
    kinds = list(plain(field.annotation))
    if bool in kinds:
        return "true", True
    for kind in kinds:
        if get_origin(kind) is tuple:
            return ("3,5", [3, 5]) if int in get_args(kind) else ("a,b", ["a", "b"])
        if get_origin(kind) is Literal and kinds == [kind]:
            value = next(choice for choice in get_args(kind) if choice != field.default)
            return str(value), value
        if isinstance(kind, type) and issubclass(kind, str) and kind is not str:
            value = next(choice for choice in kind if choice != field.default).value  # type: ignore[attr-defined]
            return value, value
    if float in kinds:
        return "7.5", 7.5
    if int in kinds:
        return ("2000000", 2000000) if name.endswith("_bytes") else ("12", 12)
    return "something", "something"


def given_by_flag(command: str, name: str, text: str) -> Options:
    flag = COMMANDS[command].flag(name).partition(",")[0]
    value = [flag] if bool in plain(COMMANDS[command].model_fields[name].annotation) else [flag, text]
    parser = GROUP
    for word in command.split():
        parser = parser.commands[word]
    given = [ARGUMENTS[command]] if command in ARGUMENTS else []
    parsed = parser.make_context(command, [*given, *value]).params
    return COMMANDS[command].load({name: parsed[name] for name in COMMANDS[command].model_fields})


@pytest.mark.parametrize(("command", "name"), FIELDS)
def test_the_three_doors_lead_to_the_same_field(
    command: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = COMMANDS[command]
    field = options.model_fields[name]
    text, value = example(field, name)
    by_flag = given_by_flag(command, name, text)
    monkeypatch.setenv(f"EMBEDQ_{name.upper()}", text)
    by_variable = options.load({})
    monkeypatch.delenv(f"EMBEDQ_{name.upper()}")
    (tmp_path / "embedq.toml").write_text(f"{name} = {json.dumps(value)}\n")
    by_file = options.load({})
    assert getattr(by_flag, name) != field.default
    assert by_flag == by_variable == by_file


def test_a_flag_wins_over_a_variable_and_a_variable_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "embedq.toml").write_text('max_length = 10\nmodel = "file"\nprompt = "file"\nstrict = true\n')
    monkeypatch.setenv("EMBEDQ_MAX_LENGTH", "20")
    monkeypatch.setenv("EMBEDQ_MODEL", "variable")
    options = RunOptions.load({"max_length": "30", "strict": False})
    assert (options.max_length, options.model, options.prompt, options.strict) == (30, "variable", "file", False)
    assert options.queue == "default"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_80_columns_and_explains_every_flag(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = in_process(capsys, *command.split(), "--help")
    assert shown.status == 0
    assert max(map(len, shown.out.splitlines())) <= 80
    assert not any(mark in shown.out.partition("Options:")[0] for mark in ("{", "<", "[["))
    words = shown.out.replace(",", " ").split()
    for name, field in COMMANDS[command].model_fields.items():
        flag = COMMANDS[command].flag(name).partition(",")[0]
        assert flag in words
        assert f"[EMBEDQ_{name.upper()}]" in words
        assert field.description, f"{flag} has no help text"
        assert len(field.description.split()) >= 3


def test_the_command_alone_shows_every_command_whole(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = in_process(capsys)
    assert shown.status == 0
    assert "..." not in shown.out.partition("Commands:")[2]
    for command in COMMANDS:
        assert f"\n  {command.split()[0]} " in shown.out
    assert set(COMMANDS.values()) == set(ALL_OPTIONS)


def refused(shown: Finished, *parts: str) -> None:
    assert shown.status == 2
    assert shown.sentence.startswith("error: usage: ")
    for part in parts:
        assert part in shown.sentence


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("--dimensions", "many"), ("--dimensions must be a valid integer, found 'many'",)),
        (("--dimensions", "0"), ("--dimensions must be greater than or equal to 1",)),
        (("--dimensions", "33"), ("--dimensions 33 is above the model's 32",)),
        (("--max-length", "1"), ("--max-length must be greater",)),
        (("--max-length", "49"), ("--max-length 49 is above the model's 48",)),
        (("--engine", "warp"), ("--engine must be 'auto', 'native', 'transformers' or 'null', found 'warp'",)),
        (("--truncation-side", "up"), ("--truncation-side must be 'right' or 'left'",)),
        (("--tensor-parallel", "0"), ("--tensor-parallel must be", "or 'auto'")),
        (("--max-batch-tokens", "-1"), ("--max-batch-tokens must be",)),
        (("--threads", "0"), ("--threads must be",)),
        (("--gpus", "0,x"), ("--gpus must be a valid integer, found 'x'",)),
        (("--gpus", "0,1,2", "--tensor-parallel", "2"), ("3 GPUs do not divide",)),
        (("--tokenizers", "0"), ("--tokenizers and --embedders must be at least 1",)),
        (("--lease-s", "0.1"), ("--lease-s must be",)),
        (("--queue", "a b"), ("'a b' is not a queue name",)),
        (("--prompt", "x", "--prompt-name", "query"), ("--prompt and --prompt-name exclude each other",)),
        (("--prompt-name", "nope"), ("the model has no prompt 'nope'; it has: passage, query",)),
        (("--metadata", "vector"), ("--metadata", "may not be named vector")),
        (("--metadata", "id"), ("'id' is used twice",)),
        (("--metadata", "a", "--metadata", "a"), ("'a' is used twice",)),
        (("--id", "text"), ("'text' is used twice",)),
        (("--text", 'a"b'), ("holds a quote",)),
        (("--template", "{a"), ("error: usage: --template cannot be read: expected '}'",)),
        (("--redis", "localhost"), ("'localhost' has no known scheme; use one of redis://",)),
        (("--redis", "redis://:hunter2@host:port"), ("redis://:***@host:port",)),
        (("--max-lenght", "5"), ("No such option: --max-lenght", "see embedq run --help")),
        (("--dimensions",), ("requires an argument",)),
    ],
    ids=lambda value: " ".join(value)[:40],
)
def test_a_wrong_value_is_refused_in_one_sentence_before_anything_is_written(
    arguments: tuple[str, ...], parts: tuple[str, ...], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, out = write_corpus(tmp_path / "c.jsonl", documents(1)), tmp_path / "out"
    shown = in_process(capsys, "run", corpus, "-o", out, "--model", model, *arguments)
    refused(shown, *parts)
    assert "hunter2" not in shown.err
    assert not out.exists()


def test_missing_arguments_are_named(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = write_corpus(tmp_path / "c.jsonl", documents(1))
    refused(in_process(capsys, "run"), "SOURCE", "see embedq run --help")
    refused(in_process(capsys, "run", corpus, "--model", model), "--output is missing")
    refused(in_process(capsys, "run", corpus, "-o", "out"), "--model is missing")
    refused(in_process(capsys, "worker"), "--model is missing")
    refused(in_process(capsys, "embed"), "No such command 'embed'")
    refused(in_process(capsys, "results", "some-run", "--after"), "requires an argument")


def test_a_wrong_value_names_the_door_it_came_through(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ("run", write_corpus(tmp_path / "c.jsonl", documents(1)), "-o", tmp_path / "out", "--model", model)
    (tmp_path / "embedq.toml").write_text("prefetch = 0\n")
    refused(in_process(capsys, *command), "prefetch in embedq.toml must be greater than or equal to 1, found '0'")
    monkeypatch.setenv("EMBEDQ_PREFETCH", "none")
    refused(in_process(capsys, *command), "EMBEDQ_PREFETCH must be a valid integer, found 'none'")
    refused(in_process(capsys, *command, "--prefetch", "-3"), "--prefetch must be", "found '-3'")


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("modle = 'x'", "modle; did you mean model?"),
        ("[run]\nmodel = 'x'", "embedq.toml has a table [run]; keys stand at the top"),
        ("model = ", "embedq.toml cannot be read"),
        ("prompt = 5", "prompt in embedq.toml must be a valid string"),
        ("metadata = [1]", "metadata in embedq.toml must be a valid string"),
    ],
)
def test_a_file_with_an_unknown_key_or_a_wrong_type_is_refused(
    content: str, part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "embedq.toml").write_text(content)
    refused(in_process(capsys, "run", "c.jsonl", "-o", "out"), part)
