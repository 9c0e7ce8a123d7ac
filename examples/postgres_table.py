"""Embed a column of a PostgreSQL table into a table of vectors beside it, by pgvector.

    python examples/postgres_table.py postgresql://me@localhost/mydb articles --id id --text body \\
        --model Qwen/Qwen3-Embedding-0.6B --work work

Writes `articles_embeddings` (id text, vector, ...), to be joined on `id = articles.id::text`. Readers see the old
table until the new one is whole. The same command resumes an interrupted run while the rows are the same, and computes
them anew when they have changed.

Needs `pip install 'embedq[worker,pgvector]'`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import psycopg
from psycopg import sql


def write_corpus(url: str, table: str, id_column: str, text_column: str, path: Path) -> str:
    """Write the table's rows as JSON lines, in the order of their ids. Returns a digest: equal for equal rows."""
    query = sql.SQL("SELECT {0}::text, {1}::text FROM {2} WHERE {1} IS NOT NULL ORDER BY {0}").format(
        sql.Identifier(id_column), sql.Identifier(text_column), sql.Identifier(*table.split("."))
    )
    digest = hashlib.sha256()
    # A named cursor lives on the server and sends some rows at a time.
    with psycopg.connect(url) as connection, connection.cursor("rows") as cursor, path.open("wb") as out:
        for row_id, text in cursor.execute(query):
            line = json.dumps({"id": row_id, "text": text}).encode() + b"\n"
            digest.update(line)
            out.write(line)
    return digest.hexdigest()[:16]


def embedq(*arguments: object) -> int:
    """Run the command; returns its exit status."""
    return subprocess.run([sys.executable, "-m", "embedq", *map(str, arguments)]).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("table")
    parser.add_argument("--id", default="id")
    parser.add_argument("--text", default="text")
    parser.add_argument("--model", required=True)
    parser.add_argument("--work", type=Path, default=Path("work"), help="directory for the corpus and the dataset")
    args = parser.parse_args()

    args.work.mkdir(parents=True, exist_ok=True)
    fresh = args.work / "rows.jsonl"
    state = write_corpus(args.url, args.table, args.id, args.text, fresh)
    corpus, dataset = args.work / f"{state}.jsonl", args.work / state
    fresh.replace(corpus)
    # 3: complete, but some documents failed; `embedq errors` names them.
    if (status := embedq("run", corpus, "-o", dataset, "--model", args.model)) not in (0, 3):
        return status
    to = ("--to", "pgvector", "--url", args.url, "--table", f"{args.table}_embeddings", "--replace")
    return embedq("export", dataset, *to)


if __name__ == "__main__":
    sys.exit(main())
