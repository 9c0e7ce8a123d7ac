"""The command line. Each command is a thin face over a function that a test can call."""

from __future__ import annotations

import io
import json
import logging
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Annotated, Any

import redis
import typer
from embedq_broker.connect import broker_errors, connect
from embedq_broker.keys import Keys
from embedq_broker.liveness import heartbeats
from embedq_broker.registry import Registry
from embedq_schemas.dead_letter import DeadLetter
from embedq_schemas.errors import EmbedqError, RunIncompleteError, UsageError
from embedq_worker.sinks.dataset import dataset_at
from embedq_worker.sinks.errors import read_errors
from rich.console import Console
from rich.live import Live
from rich.text import Text

from embedq import directory, display, model_commands, queries
from embedq.dataset import commands as dataset_commands
from embedq.help_text import HelpfulCommand, HelpfulGroup
from embedq.options import (
    CancelOptions,
    ErrorsOptions,
    ProduceOptions,
    ResultsOptions,
    RetryOptions,
    RunOptions,
    RunPlaceOptions,
    StatusOptions,
    WorkerOptions,
)
from embedq.params import with_options
from embedq.printable import printable
from embedq.serve import ServeOptions

app = typer.Typer(
    name="embedq",
    help="Turn a corpus of texts into L2-normalised vectors: fast, exact, nothing lost or doubled.\n\n"
    "Exit status: 0 complete; 1 failed, cancelled or an internal error; 2 wrong usage, input, output or model; "
    "3 complete, with failed documents; 4 incomplete, the same command resumes; 5 Redis, disk or worker processes "
    "failed. Every flag is also an EMBEDQ_* variable and a key of embedq.toml in the current directory.",
    cls=HelpfulGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_CLICK_ERROR: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
"""Newer releases of typer bring a click of their own, older ones use the package."""


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"embedq {metadata.version('embedq')}")
        raise typer.Exit


@app.callback()
def _embedq(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Options before a command."""


Sources = Annotated[
    list[str],
    typer.Argument(
        metavar="SOURCE",
        help="Files, directories, globs, URLs, or - for standard input: JSONL, JSON, CSV, Parquet, Arrow, text.",
    ),
]
_A_RUN = "A run's name, or the output of `embedq run`: a directory or s3://bucket/prefix."
RunName = Annotated[str, typer.Argument(metavar="RUN", help=_A_RUN)]
OptionalRunName = Annotated[str | None, typer.Argument(metavar="RUN", help=f"{_A_RUN} Without it: all runs.")]


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


@app.command(cls=HelpfulCommand)
@with_options(RunOptions)
def run(sources: Sources, options: RunOptions) -> int:
    """Embed a corpus into a Parquet dataset on this machine; the same command again resumes it."""
    from embedq.run import estimate_run, exit_status, run_corpus

    _log(options.log_level)
    out, err = display.consoles()
    if options.dry_run:
        for line in estimate_run(sources, options).lines():
            _say(out, line)
        return 0
    stop = _Stop()
    started = time.monotonic()
    with display.RunProgress(err) as progress:
        state = run_corpus(sources, options, stopping=stop, on_progress=progress.show, on_note=progress.note)
    seconds = time.monotonic() - started if progress.shown else None
    _say(out, display.summary(state, seconds, progress.tokens_before or 0))
    if state.error:
        _say(err, f"error: run_failed: {state.error}")
    if state.counters.failed:
        _say(err, f"to see the failed documents: embedq errors {shlex.quote(str(options.output))}")
    return exit_status(state)


@app.command(cls=HelpfulCommand)
@with_options(ProduceOptions)
def produce(sources: Sources, options: ProduceOptions) -> int:
    """Send a corpus to the queue for workers elsewhere; the same command again resumes it."""
    from embedq.produce import produce_corpus

    out, err = display.consoles()
    state, status = produce_corpus(sources, options, stopping=_Stop(), on_note=lambda note: _say(err, note))
    _say(out, f"run {state.spec.run}: {state.counters.input:,} documents sent, status {state.status}")
    if state.error:
        _say(err, f"error: run_failed: {state.error}")
        return status
    if options.wait:
        _say(err, display.summary(state))
    if state.counters.failed and options.wait:
        _say(err, f"to see the failed documents: embedq errors {state.spec.run}")
    if options.output is None:
        _say(err, f"to see the vectors: embedq results {state.spec.run}")
    return status


@app.command(cls=HelpfulCommand)
@with_options(WorkerOptions)
def worker(options: WorkerOptions) -> int:
    """Run tokenizer and embedder processes against the queue until stopped."""
    from embedq.serve_worker import run_worker

    _log(options.log_level)
    return run_worker(options, _Stop())


@app.command(cls=HelpfulCommand)
@with_options(ServeOptions)
def serve(options: ServeOptions) -> int:
    """Answer HTTP requests: OpenAI's embeddings, files and batches; with --model, also do the work, on this machine."""
    from embedq.serve import run_gateway

    _log(options.log_level)
    return run_gateway(options, _Stop(), lambda url: print(f"listening on {url}"))


@app.command(cls=HelpfulCommand)
@with_options(StatusOptions)
def status(options: StatusOptions, run: OptionalRunName = None) -> int:
    """Show runs, their exact counters, and which worker processes are alive, stuck or silent."""
    out, _ = display.consoles()
    finished = directory.resting_run(run, options) if run else None

    def shown() -> str:
        if finished is not None:
            return "\n".join(display.runs_lines([finished]))
        with _queue_of(run, options) as (client, keys, name):
            registry = Registry(client, keys)
            states = [registry.state(name)] if name else registry.runs(20)
            workers = display.workers_lines(heartbeats(client, keys), silent_after_s=30)
            backlog = f"backlog: {registry.backlog_bytes():,} bytes"
            return "\n".join([*display.runs_lines(states), "", *workers, "", backlog])

    if options.json_output:
        if finished is not None:
            document = {"runs": [display.state_json(finished)], "workers": []}
        else:
            with _queue_of(run, options) as (client, keys, name):
                document = queries.status_document(client, keys, name)
        print(json.dumps(document))
        return 0
    if not options.watch:
        _say(out, shown())
        return 0
    stop = _Stop()
    with Live(Text(shown()), console=out, auto_refresh=False) as live:
        while not stop.event.wait(1.0):
            # The embedded server of `embedq run` ends with its run; what the run came to lies in the directory.
            finished = directory.resting_run(run, options) if run else None
            live.update(Text(shown()), refresh=True)
            if finished is not None:
                break
    return 0


@app.command(cls=HelpfulCommand)
@with_options(ResultsOptions)
def results(run: RunName, options: ResultsOptions) -> int:
    """Print a run's vectors as JSON lines: from its result stream, or from its dataset where this machine sees it."""
    stop = _Stop()
    if directory.resting_run(run, options) is not None:
        queries.print_dataset(dataset_at(run), over=lambda: True, follow=False, stopping=stop, out=sys.stdout)
        return 0
    with _queue_of(run, options) as (client, keys, name):
        cursor = queries.print_results(
            client, keys, str(name), follow=options.follow, after=options.after, stopping=stop, out=sys.stdout
        )
    if cursor:
        print(f"cursor: {cursor}", file=sys.stderr)
    return 0


@app.command(cls=HelpfulCommand)
@with_options(ErrorsOptions)
def errors(run: RunName, options: ErrorsOptions) -> int:
    """Print a run's dead letters: line, id, stage, code and message of each document without a vector."""
    if directory.resting_run(run, options) is not None:
        _print_errors(read_errors(dataset_at(run)), options)
        return 0
    with _queue_of(run, options) as (client, keys, name):
        _print_errors(queries.errors_of(client, keys, str(name)), options)
    return 0


def _print_errors(letters: Iterable[DeadLetter], options: ErrorsOptions) -> None:
    for letter in letters:
        if options.code and letter.code != options.code:
            continue
        if options.json_output:
            print(letter.encode().decode())
        else:
            where = f"line {letter.line}" if letter.line else f"document {letter.ordinal}"
            where = f"{where}, chunk {letter.chunk}" if letter.chunk is not None else where
            where = f"{letter.file}, {where}" if letter.file else where
            parts = (where, letter.id or "-", letter.stage, letter.code, letter.message)
            print(*map(printable, parts), sep="\t")


@app.command(cls=HelpfulCommand)
@with_options(RetryOptions)
def retry(
    output: Annotated[str, typer.Argument(metavar="DIR", help="Output of `embedq run`: a directory or a URL.")],
    options: RetryOptions,
) -> int:
    """Open a dataset again for its failed documents; the command that made it then sends just those."""
    from embedq.retry import reopen

    count = reopen(output, options.code, options.state)
    if count:
        print(f"{count:,} failed documents to send again: repeat the embedq run command that made {output}")
    else:
        print(f"{output} has no such failed documents")
    return 0


@app.command(cls=HelpfulCommand)
@with_options(CancelOptions)
def cancel(run: RunName, options: CancelOptions) -> int:
    """Stop a run for good: documents that are not computed yet are skipped, and counted as such."""
    finished = directory.resting_run(run, options)
    if finished is not None and finished.status.terminal:
        print(f"run {finished.spec.run}: {finished.status}")
        return 0
    with _queue_of(run, options) as (client, keys, name):
        print(f"run {name}: {Registry(client, keys).cancel(str(name))}")
    return 0


dataset_commands.add_to(app)
model_commands.add_to(app)


@contextmanager
def _queue_of(run: str | None, options: RunPlaceOptions) -> Iterator[tuple[redis.Redis, Keys, str | None]]:
    """Where a run lives: the configured queue, or the server inside an output directory of `embedq run`."""
    place = directory.Place(options.redis_url, options.queue, run or "")
    if run is not None and directory.is_directory_name(run):
        place = directory.locate(run, options.redis_url, options.state)
    # An embedded server that is gone stays gone: no connection to one is retried.
    with broker_errors(place.url), connect(place.url, role="cli", blocking=place.url != options.redis_url) as client:
        yield client, Keys(place.queue), place.run or None


def _say(console: Console, sentence: str) -> None:
    console.print(sentence, highlight=False, soft_wrap=True, markup=False)


def _log(level: str) -> None:
    logging.basicConfig(level=level, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")


def main(arguments: list[str] | None = None) -> None:
    """Entry point: an error a person can mend is one line on standard error and an exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # What is said while a command waits must reach a pipe or a log file at once.
        sys.stdout.reconfigure(line_buffering=True)
    given = sys.argv[1:] if arguments is None else arguments
    sys.exit(guarded(lambda: app(given or ["--help"], prog_name="embedq", standalone_mode=False)))


def guarded(command: Callable[[], object]) -> int:
    """Run `command`; print an EmbedqError as one line. Returns the exit status."""
    try:
        status = command()
    except RunIncompleteError as error:
        print(f"incomplete: {_one_line(error)}", file=sys.stderr)
        return error.exit_code
    except EmbedqError as error:
        print(f"error: {error.code}: {_one_line(error)}", file=sys.stderr)
        return error.exit_code
    except typer.Exit as error:
        return error.exit_code
    except _CLICK_ERROR as error:
        context = getattr(error, "ctx", None)
        where = context.command_path if context is not None else "embedq"
        sentence = _one_line(error.format_message()).rstrip(".")
        print(f"error: {UsageError.code}: {sentence}; see {where} --help", file=sys.stderr)
        return UsageError.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return RunIncompleteError.exit_code
    except BrokenPipeError:
        # The reader of our output, such as `head`, has seen enough.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        return 0
    return status if isinstance(status, int) else 0


def _one_line(message: object) -> str:
    return " ".join(str(message).split())
