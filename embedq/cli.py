"""The command line. Each command is a thin face over a function that a test can call."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import redis
import typer
from embedq_broker.connect import broker_errors, connect
from embedq_broker.keys import Keys
from embedq_broker.liveness import heartbeats
from embedq_broker.registry import Registry
from embedq_schemas.errors import EmbedqError, RunIncompleteError, UsageError
from rich.console import Group
from rich.live import Live

from embedq import display, queries
from embedq.options import (
    CancelOptions,
    ConnectOptions,
    ErrorsOptions,
    ProduceOptions,
    ResultsOptions,
    RunOptions,
    StatusOptions,
    WorkerOptions,
)
from embedq.params import with_options

app = typer.Typer(
    name="embedq",
    help="Turn a corpus of texts into L2-normalised vectors: fast, exact, nothing lost or doubled.\n\n"
    "Exit status: 0 complete; 1 failed, cancelled or an internal error; 2 wrong usage, input, output or model; "
    "3 complete, with failed documents; 4 incomplete, the same command resumes; 5 Redis, disk or worker processes "
    "failed. Every flag is also an EMBEDQ_* variable and a key of embedq.toml in the current directory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Corpus = Annotated[Path, typer.Argument(help="JSONL file: one JSON object a line, with a text and perhaps an id.")]
RunName = Annotated[str, typer.Argument(help="A run's name, or the output directory of `embedq run`.")]
OptionalRunName = Annotated[
    str | None, typer.Argument(help="A run's name, or the output directory of `embedq run`. Without it: all runs.")
]


class _Stop:
    """The first SIGINT or SIGTERM asks to stop in order, the third ends the process at once."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self._count = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, *_: object) -> None:
        self._count += 1
        self.event.set()
        if self._count >= 3:
            os._exit(4)

    def __call__(self) -> bool:
        return self.event.is_set()


@app.command()
@with_options(RunOptions)
def run(corpus: Corpus, options: RunOptions) -> int:
    """Embed a corpus into a Parquet dataset on this machine; the same command again resumes it."""
    from embedq.run import exit_status, run_corpus

    if options.output == Path():
        raise UsageError("--output is missing: name the directory for the dataset")
    _log(options.log_level)
    out, err = display.consoles()
    stop = _Stop()
    started = time.monotonic()
    with display.RunProgress(err) as progress:
        state = run_corpus(corpus, options, stopping=stop, on_progress=progress.show, on_note=progress.note)
    out.print(display.summary(state, time.monotonic() - started), highlight=False, soft_wrap=True)
    if state.error:
        err.print(f"error: run_failed: {state.error}", highlight=False, soft_wrap=True)
    if state.counters.failed:
        err.print(f"failed documents: embedq errors {options.output}", highlight=False, soft_wrap=True)
    return exit_status(state)


@app.command()
@with_options(ProduceOptions)
def produce(corpus: Corpus, options: ProduceOptions) -> int:
    """Send a corpus to the queue for workers elsewhere; the same command again resumes it."""
    from embedq.produce import produce_corpus

    out, _ = display.consoles()
    stop = _Stop()
    state, status = produce_corpus(
        corpus, options, stopping=stop, on_note=lambda note: out.print(note, highlight=False, soft_wrap=True)
    )
    out.print(f"run {state.spec.run}: {state.counters.input:,} documents sent, status {state.status}", highlight=False)
    return status


@app.command()
@with_options(WorkerOptions)
def worker(options: WorkerOptions) -> int:
    """Run tokenizer and embedder processes against the queue until stopped."""
    from embedq.serve_worker import run_worker

    _log(options.log_level)
    return run_worker(options, _Stop())


@app.command()
@with_options(StatusOptions)
def status(options: StatusOptions, run: OptionalRunName = None) -> int:
    """Show runs, their exact counters, and which worker processes are alive, stuck or silent."""
    out, _ = display.consoles()

    def tables() -> Group:
        client, keys, name = _queue_of(run, options)
        with broker_errors(options.redis_url):
            registry = Registry(client, keys)
            states = [registry.state(name)] if name else registry.runs(20)
            parts = [display.runs_table(states), display.workers_table(heartbeats(client, keys), silent_after_s=30)]
            return Group(*parts, f"backlog: {registry.backlog_bytes():,} bytes")

    if options.json_output:
        client, keys, name = _queue_of(run, options)
        with broker_errors(options.redis_url):
            print(json.dumps(queries.status_document(client, keys, name)))
        return 0
    if not options.watch:
        out.print(tables())
        return 0
    stop = _Stop()
    with Live(tables(), console=out, auto_refresh=False) as live:
        while not stop.event.wait(1.0):
            live.update(tables(), refresh=True)
    return 0


@app.command()
@with_options(ResultsOptions)
def results(run: RunName, options: ResultsOptions) -> int:
    """Print a run's vectors as JSON lines: from its result stream, or from its dataset where this machine sees it."""
    client, keys, name = _queue_of(run, options)
    stop = _Stop()
    with broker_errors(options.redis_url):
        cursor = queries.print_results(
            client, keys, str(name), follow=options.follow, after=options.after, stopping=stop, out=sys.stdout
        )
    if cursor:
        print(f"cursor: {cursor}", file=sys.stderr)
    return 0


@app.command()
@with_options(ErrorsOptions)
def errors(run: RunName, options: ErrorsOptions) -> int:
    """Print a run's dead letters: id, line, stage, code and message of each document without a vector."""
    letters = queries.errors_of(run, options, _queue_of)
    if options.code:
        letters = (letter for letter in letters if letter.code == options.code)
    if options.json_output:
        for letter in letters:
            print(letter.encode().decode())
        return 0
    out, _ = display.consoles()
    for letter in letters:
        line = f"line {letter.line}" if letter.line else f"document {letter.ordinal}"
        out.print(
            f"{line}\t{letter.id or '-'}\t{letter.stage}\t{letter.code}\t{letter.message}",
            highlight=False, soft_wrap=True, markup=False,
        )  # fmt: skip
    return 0


@app.command()
@with_options(CancelOptions)
def cancel(run: RunName, options: CancelOptions) -> int:
    """Stop a run for good: documents that are not computed yet are skipped, and counted as such."""
    client, keys, name = _queue_of(run, options)
    with broker_errors(options.redis_url):
        print(f"run {name}: {Registry(client, keys).cancel(str(name))}")
    return 0


def _queue_of(run: str | None, options: ConnectOptions) -> tuple[redis.Redis, Keys, str | None]:
    """Where a run lives: the configured queue, or the server inside an output directory of `embedq run`."""
    if run is not None and ("/" in run or Path(run).is_dir()):
        url, queue, name = queries.locate(Path(run))
        return connect(url, role="cli"), Keys(queue), name
    return connect(options.redis_url, role="cli"), Keys(options.queue), run


def _log(level: str) -> None:
    logging.basicConfig(level=level, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")


def main(arguments: list[str] | None = None) -> None:
    """Entry point: an error a person can mend is one line on standard error and an exit status."""
    sys.exit(guarded(lambda: app(arguments, standalone_mode=False)))


def guarded(command: Callable[[], object]) -> int:
    """Run `command`; print an EmbedqError as one line. Returns the exit status."""
    import click

    try:
        status = command()
    except RunIncompleteError as error:
        print(f"incomplete: {error}", file=sys.stderr)
        return error.exit_code
    except EmbedqError as error:
        print(f"error: {error.code}: {error}", file=sys.stderr)
        return error.exit_code
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.ClickException as error:
        error.show()
        return UsageError.exit_code
    except (KeyboardInterrupt, click.Abort):
        return RunIncompleteError.exit_code
    except BrokenPipeError:
        # The reader of our output, such as `head`, has seen enough.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        return 0
    return status if isinstance(status, int) else 0
