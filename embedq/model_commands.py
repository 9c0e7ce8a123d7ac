"""Commands about a model and this machine: what a checkpoint holds, what works here, how fast it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated

import typer
from embedq_broker.connect import check_server, connect, mask_url, translate
from embedq_schemas.errors import BrokerUnavailableError, EmbedqError, ModelError, UsageError
from embedq_worker.doctor import Finding, examine
from embedq_worker.inspect import Inspection, inspect_checkpoint
from redis.exceptions import RedisError

from embedq.help_text import HelpfulCommand, HelpfulGroup
from embedq.options import BenchOptions, DoctorOptions, ModelOptions
from embedq.params import with_options

model_app = typer.Typer(
    name="model", help="Look into a checkpoint.", cls=HelpfulGroup, rich_markup_mode=None, no_args_is_help=True
)
Checkpoint = Annotated[
    str | None, typer.Argument(metavar="MODEL", help="Checkpoint folder or hub id; instead of --model.")
]


@model_app.command(cls=HelpfulCommand)
@with_options(ModelOptions)
def inspect(options: ModelOptions, checkpoint: Checkpoint = None) -> int:
    """Show what a checkpoint's files say, what will be done with it, and the memory and limits that follow."""
    chosen = options.model_copy(update={"model": checkpoint}) if checkpoint else options
    inspection = inspect_checkpoint(chosen.checkpoint(), chosen.engine_settings())
    if options.json_output:
        print(json.dumps(asdict(inspection)))
    else:
        _print_inspection(inspection)
    return 0


def _print_inspection(inspection: Inspection) -> None:
    print(f"{inspection.model_id}  (fingerprint {inspection.fingerprint[:12]})")
    for title, facts in (("read", inspection.read), ("plan", inspection.plan)):
        print(f"\n{title}")
        for name, value in facts.items():
            print(f"  {name:24} {value}")
    print(f"\nmemory\n  {'weights':24} {inspection.weight_bytes / 1e9:.2f} GB")
    print(f"  {'per token of a batch':24} {inspection.bytes_per_token / 1e3:.0f} kB")
    for note in inspection.notes:
        print(f"note: {note}")


@with_options(DoctorOptions)
def doctor(options: DoctorOptions) -> int:
    """Check this machine: packages, devices, attention backends, the server, and with --model its tokenizer."""
    findings = [*examine(), _server(options), *_tokenizer(options)]
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        print(f"{finding.state:8} {finding.subject:{width}}  {finding.detail}")
    return 1 if any(finding.state == "failed" for finding in findings) else 0


def _server(options: DoctorOptions) -> Finding:
    try:
        warnings = check_server(connect(options.redis_url, role="doctor", blocking=True), options.redis_url)
    except RedisError as error:
        return Finding("redis", "missing", str(translate(error, options.redis_url)))
    except BrokerUnavailableError as error:
        # No failure of the machine: `embedq run` brings a server of its own.
        return Finding("redis", "missing", str(error))
    except EmbedqError as error:
        return Finding("redis", "failed", str(error))
    return Finding("redis", "ok", "; ".join([mask_url(options.redis_url), *warnings]))


def _tokenizer(options: DoctorOptions) -> Iterator[Finding]:
    if not options.model:
        return
    from embedq_worker.tokenization import TextTokenizer

    try:
        checkpoint = options.checkpoint()
        yield Finding("model", "ok", f"{checkpoint.model_id}, {checkpoint.dimension} dimensions")
        tokenizer = TextTokenizer.load(checkpoint.tokenizer_file, max_length=checkpoint.max_length)
    except ModelError as error:
        yield Finding("model", "failed", str(error))
        return
    checked = f"{tokenizer.backend}, compared with the reference on the built-in probe set"
    yield Finding("tokenizer", "ok", "; ".join([checked, *tokenizer.notes]))


@with_options(BenchOptions)
def bench(options: BenchOptions) -> int:
    """Measure a model here: tokens/s, FLOP/s, and their share of the machine's own matrix rate."""
    from embedq_worker.bench import measure_speed
    from embedq_worker.engine import load_engine

    lengths = options.text_tokens
    if not lengths or min(lengths) < 1:
        raise UsageError("--text-tokens: give one or more lengths of at least 1")
    checkpoint = options.checkpoint()
    engine = load_engine(checkpoint, options.engine_settings())
    try:
        speeds = measure_speed(checkpoint, engine, text_tokens=lengths, repeats=options.repeats)
        facts = dict(engine.description)
    finally:
        engine.close()
    if options.json_output:
        print(json.dumps({"engine": facts, "speeds": [asdict(speed) for speed in speeds]}))
        return 0
    print(", ".join(f"{name} {value}" for name, value in facts.items() if value))
    for speed in speeds:
        print(
            f"texts of {speed.text_tokens} tokens: {speed.tokens_per_second:,.0f} tokens/s, "
            f"{speed.texts_per_second:,.1f} texts/s, {speed.flops / 1e9:,.0f} GFLOP/s, "
            f"{speed.share:.0%} of the matrix rate of {speed.matrix_flops / 1e9:,.0f} GFLOP/s"
        )
    return 0


def add_to(app: typer.Typer) -> None:
    """Register these commands."""
    app.add_typer(model_app)
    app.command(cls=HelpfulCommand)(doctor)
    app.command(cls=HelpfulCommand)(bench)
