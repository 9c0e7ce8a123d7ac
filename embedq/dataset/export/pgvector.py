"""PostgreSQL with pgvector: one table, filled by binary COPY and put in place in the same transaction.

Vectors become `vector`, which is float32; its half-precision type is missing in older servers and takes a cast.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pyarrow as pa
from embedq_broker.connect import mask_url
from embedq_schemas.errors import OutputError, StorageError

from embedq.dataset.extras import extra
from embedq.dataset.reader import DatasetReader

_TYPES = {
    pa.string(): "text",
    pa.int64(): "int8",
    pa.int32(): "int4",
    pa.bool_(): "bool",
    pa.float64(): "float8",
    pa.float32(): "float4",
    pa.binary(32): "bytea",
}


def export_pgvector(reader: DatasetReader, url: str, table: str, *, replace: bool) -> str:
    """Fill `table` (perhaps `schema.table`) of the database at `url`; its primary key is `reader.key`. Returns the
    place.

    All of it is one transaction: whoever reads the table meanwhile sees the old one, and a killed export leaves
    nothing. A NUL character, which PostgreSQL cannot store, becomes U+FFFD in texts and metadata.

    Raises:
        UsageError: psycopg or pgvector is not installed.
        OutputError: the table exists and `replace` is not asked for, or the server refuses the rows.
        StorageError: the server cannot be reached or went away.
    """
    with extra("pgvector"):
        import psycopg
        from pgvector.psycopg import register_vector
    place = f"table {table} at {mask_url(url)}"
    try:
        with psycopg.connect(url) as connection:
            connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
            register_vector(connection)
            _fill(connection, reader, table, replace=replace)
    except psycopg.OperationalError as error:
        raise StorageError(f"cannot write {place}: {_first_line(error)}") from None
    except psycopg.errors.UniqueViolation:
        raise OutputError(f"{reader.dataset} holds an id twice, so it is no key for a table") from None
    except (psycopg.Error, ValueError) as error:
        raise OutputError(f"cannot write {place}: {_first_line(error)}") from None
    return place


def _fill(connection: Any, reader: DatasetReader, table: str, *, replace: bool) -> None:
    from psycopg import sql

    *schema, name = table.split(".")
    target, fresh = sql.Identifier(*schema, name), sql.Identifier(*schema, f"{name[:40]}_embedq_new")
    exists = connection.execute("SELECT to_regclass(%s) IS NOT NULL", [target.as_string(connection)]).fetchone()[0]
    if exists and not replace:
        raise OutputError(f"the table {table} exists; give another one with --table, or add --replace")
    vector = f"vector({reader.dimensions})"
    kinds = [vector if field.name == "vector" else _kind(field) for field in reader.schema]
    columns = sql.SQL(", ").join(
        sql.SQL("{} {}").format(sql.Identifier(field.name), sql.SQL(kind))
        for field, kind in zip(reader.schema, kinds, strict=True)
    )
    connection.execute(sql.SQL("CREATE TABLE {} ({})").format(fresh, columns))
    with connection.cursor().copy(sql.SQL("COPY {} FROM STDIN WITH (FORMAT BINARY)").format(fresh)) as copy:
        copy.set_types([kind.partition("(")[0] for kind in kinds])
        for row in _rows(reader):
            copy.write_row(row)
    key = sql.SQL(", ").join(map(sql.Identifier, reader.key))
    connection.execute(sql.SQL("ALTER TABLE {} ADD PRIMARY KEY ({})").format(fresh, key))
    connection.execute(
        sql.SQL("COMMENT ON TABLE {} IS {}").format(fresh, sql.Literal(json.dumps(asdict(reader.facts))))
    )
    if exists:
        connection.execute(sql.SQL("DROP TABLE {}").format(target))
    connection.execute(sql.SQL("ALTER TABLE {} RENAME TO {}").format(fresh, sql.Identifier(name)))


def _kind(field: pa.Field) -> str:
    return _TYPES.get(field.type, "text")


def _rows(reader: DatasetReader) -> Iterator[list[Any]]:
    at = reader.schema.get_field_index("vector")
    for batch in reader.batches(order="input"):
        columns: list[Any] = [_storable(column.to_pylist()) for column in batch.drop_columns(["vector"]).columns]
        columns.insert(at, reader.as_float32(batch))
        yield from map(list, zip(*columns, strict=True))


def _storable(values: list[Any]) -> list[Any]:
    return [value.replace("\0", "\ufffd") if isinstance(value, str) else value for value in values]


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
