"""Commands on a finished dataset directory: inspect, search, export, compact."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from embedq_schemas.encoding import EncodingOptions, OnLong
from embedq_schemas.errors import InputError, ModelMismatchError, UsageError

from embedq.dataset.extras import extra
from embedq.dataset.inspection import DatasetInspection, inspect_dataset
from embedq.dataset.options import CompactOptions, ExportOptions, InspectOptions, SearchOptions
from embedq.dataset.reader import DatasetReader, open_dataset
from embedq.help_text import HelpfulCommand
from embedq.params import with_options
from embedq.printable import printable

if TYPE_CHECKING:
    from embedq_worker.checkpoint import Checkpoint

    from embedq.dataset.search import Hit

Place = Annotated[
    str, typer.Argument(metavar="DIR", help="Dataset that a run wrote: its directory, or s3://bucket/prefix.")
]
Question = Annotated[str | None, typer.Argument(metavar="QUESTION", help="What to look for; or --questions.")]
_BAR_COLUMNS = 40
_TEXT_COLUMNS = 100


@with_options(InspectOptions)
def inspect(dataset: Place, options: InspectOptions) -> int:
    """Show what a dataset holds: rows, files, model, norms, duplicates, token counts, errors, completeness."""
    inspection = inspect_dataset(open_dataset(dataset, partial=True))
    if options.json_output:
        document = asdict(inspection) | {"spec": inspection.spec.model_dump(mode="json")}
        print(json.dumps(document))
    else:
        _print_inspection(inspection)
    return 0


def _print_inspection(found: DatasetInspection) -> None:
    print(f"{found.path}  ({found.spec.run}, {'complete' if found.complete else 'not complete'})")
    spec, summary, facts = found.spec, found.summary, found.facts
    counts = [
        f"{summary[name]:,} {name}"
        for name in ("input", "succeeded", "failed", "skipped", "superseded")
        if name in summary
    ]
    _print_section(
        "dataset",
        {
            "rows": f"{found.rows:,}",
            "files": f"{found.files:,}, {found.size_bytes / 1e6:,.1f} MB",
            "run": ", ".join(counts),
            "columns": ", ".join(f"{name} {kind}" for name, kind in found.columns.items()),
            "errors": ", ".join(f"{count:,} {code}" for code, count in found.errors.items()),
            "repeated ids": f"{found.repeated_ids:,}",
            "repeated texts": f"{found.repeated_texts:,}",
            "files in no manifest": f"{found.strangers:,}; embedq compact removes them" if found.strangers else "",
        },
    )
    if facts is None or found.tokens is None:
        return
    norms, tokens = found.norms, found.tokens
    stored = f"{facts.vector_type}, {found.vector_bytes:,} bytes a vector"
    if found.ranges is not None:
        stored += f", ranges within {found.ranges[0]:.4f} and {found.ranges[1]:.4f}"
    _print_section(
        "model",
        {
            "name": f"{facts.model_id} {facts.revision}".rstrip(),
            "fingerprint": facts.fingerprint[:12],
            "pooling": facts.pooling,
            "computed in": facts.dtype,
            "prompt": repr(facts.prompt) if facts.prompt else "none",
            "max length": str(spec.encoding.max_length or "the model's"),
            "chunks": _chunks(spec.encoding),
        },
    )
    _print_section(
        "vectors",
        {
            "dimensions": f"{facts.dimensions}, {'L2-normalised' if facts.normalized else 'not normalised'}",
            "stored as": stored,
            "norms": f"{norms.smallest:.6f} to {norms.largest:.6f}, mean {norms.mean:.6f}" if norms else "",
            "norm is not 1": f"{norms.not_unit:,}" if norms and facts.normalized else "",
            "not finite": f"{norms.not_finite:,}" if norms and norms.not_finite else "",
        },
    )
    _print_section(
        "tokens",
        {
            "of all texts": f"{tokens.total:,}",
            "per text": f"median {tokens.median:,}, p95 {tokens.p95:,}, p99 {tokens.p99:,}, most {tokens.largest:,}",
            "truncated": f"{found.truncated:,} ({found.truncated / found.rows:.1%})",
        },
    )
    most = max(documents for _, _, documents in tokens.histogram)
    for first, last, documents in tokens.histogram:
        bar = "#" * max(1, round(_BAR_COLUMNS * documents / most))
        print(f"  {f'{first:,} to {last:,}':24} {documents:>12,} {bar}")


def _chunks(encoding: EncodingOptions) -> str:
    """Empty where texts are whole."""
    if encoding.on_long is not OnLong.CHUNK:
        return ""
    overlap = "an eighth" if encoding.chunk_overlap is None else f"{encoding.chunk_overlap} tokens"
    return f"each row is one, of at most {encoding.chunk_tokens or 'max length'} tokens; {overlap} repeated"


def _print_section(title: str, facts: dict[str, str]) -> None:
    print(f"\n{title}")
    for name, value in facts.items():
        if value:
            print(f"  {name:24} {value}")


@with_options(SearchOptions)
def search(dataset: Place, options: SearchOptions, question: Question = None) -> int:
    """Find the documents nearest to a question: exact, with the dataset's own model and its query prompt."""
    with extra("worker"):
        from embedq_worker.engine.device import usable_cores

        from embedq.dataset.questions import embed_questions, query_prompt
        from embedq.dataset.search import nearest
    questions = _questions(question, options.questions)
    reader = open_dataset(dataset, partial=options.partial)
    checkpoint = _model_of(reader, options)
    prompt = query_prompt(
        checkpoint, prompt=options.query_prompt, name=options.query_prompt_name, instruction=options.instruction
    )
    # Torch and the products each get these, one after the other.
    threads = options.threads or usable_cores()
    settings = options.engine_settings().model_copy(update={"threads": threads})
    vectors = embed_questions(checkpoint, settings, questions, prompt=prompt, encoding=reader.spec.encoding)
    for asked, hits in zip(questions, nearest(reader, vectors, options.top_k, threads=threads), strict=True):
        if options.json_output:
            results = [{"rank": rank, "score": hit.score, **hit.row} for rank, hit in enumerate(hits, 1)]
            print(json.dumps({"question": asked, "results": results}, ensure_ascii=False))
        else:
            _print_hits(asked if len(questions) > 1 else None, hits)
    return 0


def _questions(question: str | None, file: Path | None) -> list[str]:
    if (question is None) == (file is None):
        raise UsageError("give one question, or --questions with a file that has one a line")
    if question is not None:
        return [question]
    try:
        text = sys.stdin.read() if file == Path("-") else Path(str(file)).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the questions in {file} cannot be read: {error}") from None
    if not (questions := [line for line in text.splitlines() if line.strip()]):
        raise InputError(f"{file} holds no question")
    return questions


def _model_of(reader: DatasetReader, options: SearchOptions) -> Checkpoint:
    """The dataset's model; raises ModelMismatchError where `--model` names another."""
    facts = reader.facts
    if options.model:
        checkpoint = options.checkpoint()
    elif "/" in facts.model_id:
        named = {"model": facts.model_id, "revision": options.revision or facts.revision or None}
        checkpoint = options.model_copy(update=named).checkpoint()
    else:
        raise UsageError(
            f"{reader.dataset} was made with a model in a folder named {facts.model_id!r}; say with --model where it is"
        )
    if checkpoint.fingerprint != facts.fingerprint:
        raise ModelMismatchError(
            f"{reader.dataset} was made with the model {facts.model_id} ({facts.fingerprint[:12]}), "
            f"{options.model or facts.model_id} is another one ({checkpoint.fingerprint[:12]})"
        )
    return checkpoint


def _print_hits(question: str | None, hits: Sequence[Hit]) -> None:
    if question is not None:
        print(f"\n{question}")
    for rank, hit in enumerate(hits, 1):
        row = dict(hit.row)
        facts = [f"{rank:>4}  {hit.score:.4f}  {row.pop('id')}"]
        text = row.pop("text", None)
        for name in ("ordinal", "n_tokens", "truncated"):
            row.pop(name)
        facts += [f"{name}={value}" for name, value in row.items() if value is not None]
        if text is not None:
            line = " ".join(text.split())
            facts.append(line if len(line) <= _TEXT_COLUMNS else f"{line[:_TEXT_COLUMNS]}...")
        print("  ".join(map(printable, facts)))


@with_options(ExportOptions)
def export(dataset: Place, options: ExportOptions) -> int:
    """Write a dataset for another program: NumPy, FAISS, Lance, JSON lines, PostgreSQL with pgvector, or Qdrant."""
    from embedq.dataset.export import export_dataset

    reader = open_dataset(dataset, partial=options.partial)
    if options.pool_chunks:
        from embedq.dataset.pooling import pooled

        reader = pooled(reader)
        if reader.left_out:
            print(f"left out, for some of their chunks have no vector: {reader.left_out:,} documents", file=sys.stderr)
    place = export_dataset(reader, options)
    print(f"{reader.rows:,} vectors of {reader.dimensions} dimensions: {place}")
    return 0


@with_options(CompactOptions)
def compact(dataset: Place, options: CompactOptions) -> int:
    """Merge a complete dataset's small files and drop doubled rows; safe beside readers and against any kill."""
    from embedq.dataset.compaction import compact_dataset

    done = compact_dataset(dataset, file_bytes=options.compact_file_bytes, grace_s=options.superseded_grace_s)
    if done.files_before == done.files_after and not done.rows_dropped:
        print(f"{dataset}: {_files(done.files_after)}, nothing to merge")
    else:
        dropped = f", {done.rows_dropped:,} doubled rows dropped" if done.rows_dropped else ""
        print(f"{dataset}: {_files(done.files_before)} became {done.files_after:,}{dropped}")
    if done.waiting_files:
        when = f"a later embedq compact removes {done.waiting_files:,} replaced files"
        print(f"{when}, once they are {options.superseded_grace_s:,.0f} s old")
    return 0


def _files(count: int) -> str:
    return f"{count:,} file{'' if count == 1 else 's'}"


def add_to(app: typer.Typer) -> None:
    """Register these commands."""
    for command in (inspect, search, export, compact):
        app.command(cls=HelpfulCommand)(command)
