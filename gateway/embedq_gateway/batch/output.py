"""A batch's files: a line for each request, in the order of the input, each in exactly one of the two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from embedq_broker.batches import BatchRecord
from embedq_schemas.dead_letter import DeadLetter
from embedq_worker.sinks.files import storage_errors

from embedq_gateway.answers import embeddings_body, to_json
from embedq_gateway.batch.lines import LineError, decode_line, read_lines
from embedq_gateway.batch.plan import REFUSED
from embedq_gateway.batch.work import BatchWork, parse_line
from embedq_gateway.errors import ApiError
from embedq_gateway.failures import of_document
from embedq_gateway.files import Draft


def write_output(
    record: BatchRecord, work: BatchWork, unfinished: ApiError, output: Draft, errors: Draft
) -> tuple[int, int]:
    """Write both files; requests without an outcome get `unfinished`. Returns (completed, failed); raises StorageError.

    The same batch gives the same bytes whoever writes it, so that a second writer changes nothing.
    """
    completed = failed = 0
    plan = work.plan
    with storage_errors(f"read {work.source}"), work.source.open("rb") as file:
        for line, (offset, run) in enumerate(zip(plan.offsets.tolist(), plan.runs.tolist(), strict=True)):
            file.seek(offset)
            raw = file.readline()
            request_id = _request_id(record, line)
            if run == REFUSED:
                status, body = plan.refusals[line]
                answer = _answer(request_id, decode_line(raw, len(raw)).custom_id, status, body)
                errors.write(to_json(answer) + b"\n")
                failed += 1
                continue
            custom_id, request, inputs = parse_line(raw)
            vectors, tokens, failures = work.outcome(line)
            if tokens.all():
                body = embeddings_body(np.asarray(vectors), int(tokens.sum()), request.model, as_base64=request.base64)
                output.write(to_json(_answer(request_id, custom_id, 200, body)) + b"\n")
                completed += 1
                continue
            answer = _failed(request_id, custom_id, failures, len(inputs), unfinished)
            errors.write(to_json(answer) + b"\n")
            failed += 1
    return completed, failed


def write_unstarted(
    record: BatchRecord, source: Path, unfinished: ApiError, most_bytes: int, output: Draft, errors: Draft
) -> tuple[int, int]:
    """The same for a batch that ended before its file was read: no request has an outcome. Raises StorageError."""
    seen: set[str] = set()
    with storage_errors(f"read {source}"):
        if not source.exists():
            return 0, 0
        with source.open("rb") as file:
            for _, _, raw in read_lines(file, most_bytes):
                try:
                    custom_id = decode_line(raw, most_bytes).custom_id
                except LineError:
                    continue
                if custom_id not in seen:
                    errors.write(to_json(_no_answer(_request_id(record, len(seen)), custom_id, unfinished)) + b"\n")
                    seen.add(custom_id)
    return 0, len(seen)


def _request_id(record: BatchRecord, line: int) -> str:
    return f"batch_req_{record.id.removeprefix('batch_')}{line:08x}"


def _failed(
    request_id: str, custom_id: str, failures: dict[int, DeadLetter], inputs: int, unfinished: ApiError
) -> dict[str, Any]:
    if failures:
        index, letter = min(failures.items())
        error = of_document(index, letter.code, letter.message, inputs)
        return _answer(request_id, custom_id, error.status, error.body)
    return _no_answer(request_id, custom_id, unfinished)


def _answer(request_id: str, custom_id: str, status: int, body: dict[str, Any]) -> dict[str, Any]:
    response = {"status_code": status, "request_id": request_id, "body": body}
    return {"id": request_id, "custom_id": custom_id, "response": response, "error": None}


def _no_answer(request_id: str, custom_id: str, error: ApiError) -> dict[str, Any]:
    reason = {"code": error.code, "message": error.message}
    return {"id": request_id, "custom_id": custom_id, "response": None, "error": reason}
