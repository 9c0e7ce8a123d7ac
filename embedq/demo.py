"""`make demo`: embed the docstrings of the Python standard library, then ask the dataset questions.

Real texts that are on every machine, the real pipeline: an embedded server, a tokenizer process, an embedder process, a
Parquet dataset. With a trained model the answers make sense; the default model is a generated one with random weights.

    python -m embedq.demo [--model M] [--output demo-out]
"""

from __future__ import annotations

import argparse
import ast
import json
import shutil
import sys
import sysconfig
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

QUESTIONS = (
    "How do I parse JSON text?",
    "compress data with gzip",
    "run another program and capture its output",
    "schedule a function to run later in an event loop",
)


def docstrings(library: Path) -> Iterator[dict[str, str]]:
    """Documents: id is the dotted name, text the docstring, module the module's name."""
    for path in sorted(library.rglob("*.py")):
        relative = path.relative_to(library)
        if {"test", "tests", "site-packages", "idlelib", "lib2to3", "turtledemo"}.intersection(relative.parts):
            continue
        module = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, OSError):
            continue
        seen: set[str] = set()
        for name, text in _walk(tree, module):
            if name not in seen:
                seen.add(name)
                yield {"id": name, "text": f"{name}\n{text}", "module": module}


def _walk(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_docstring(node)
        if text:
            yield name, text
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _walk(child, f"{name}.{child.name}")


def write_corpus(path: Path) -> int:
    """Write the standard library's docstrings as JSON lines; returns how many."""
    path.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    with path.open("w", encoding="utf-8") as out:
        for document in docstrings(Path(sysconfig.get_paths()["stdlib"])):
            out.write(json.dumps(document) + "\n")
            count += 1
    return count


def main() -> int:
    from embedq.cli import guarded

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint folder or hub id; without it a small one is generated")
    parser.add_argument("--output", type=Path, default=Path("demo-out"))
    args = parser.parse_args()
    return guarded(lambda: demonstrate(args.model, args.output))


def demonstrate(model: str | None, output: Path) -> int:
    """The demonstration; returns the exit status."""
    from embedq.cli import main as embedq_cli

    started = time.monotonic()
    shutil.rmtree(output, ignore_errors=True)
    corpus, dataset = output / "docstrings.jsonl", output / "dataset"
    print(f"1. {write_corpus(corpus):,} docstrings of the standard library -> {corpus}")
    if model is None:
        from embedq_worker.engine.generate import generate_checkpoint

        model = str(generate_checkpoint(output / "model", hidden_size=64, layers=2, heads=4, kv_heads=2))
        print(f"2. a small Qwen3 checkpoint with random weights -> {model}")
        print("   Its vectors carry no meaning: this shows the pipeline, not the quality of the answers.")
    else:
        print(f"2. the model {model}")
    questions = output / "questions.txt"
    questions.write_text("\n".join(QUESTIONS))
    run = ["run", str(corpus), "-o", str(dataset), "--model", model, "--metadata", "module"]
    search = ["search", str(dataset), "--questions", str(questions), "--top-k", "3", "--model", model]
    for number, command in enumerate((run, search), 3):
        print(f"{number}. embedq {' '.join(command)}")
        try:
            embedq_cli(command)
        except SystemExit as end:
            if end.code:
                return int(end.code) if isinstance(end.code, int) else 1
    print(f"Done in {time.monotonic() - started:.0f} s. The dataset is ordinary Parquet: {dataset}/part-*.parquet")
    return 0


if __name__ == "__main__":
    sys.exit(main())
