"""The error tree. Every error a user can meet has one class or one stable `code`.

Codes appear unchanged in the CLI, the errors dataset, metrics and docs; a code is never reused for another cause.
Two kinds share the code space: exceptions (this tree), which end a command, and document errors, which end one
document and become an output row of the run's errors (`DocumentErrorCode`).
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar


class EmbedqError(Exception):
    """Base of every error embedq raises on purpose. Its message is one sentence a user can act on."""

    code: ClassVar[str] = "internal"
    #: Process exit status of a command ended by this error (see docs/cli.md).
    exit_code: ClassVar[int] = 1


class UsageError(EmbedqError):
    """A flag, variable or argument is wrong; nothing was started."""

    code = "usage"
    exit_code = 2


class InputError(EmbedqError):
    """The corpus cannot be read: missing, a directory, not readable, or a bad line under `--strict`."""

    code = "input"
    exit_code = 2


class OutputError(EmbedqError):
    """The output directory cannot be used: not empty, not writable, holds another run, outside the output roots."""

    code = "output"
    exit_code = 2


class ModelError(EmbedqError):
    """The checkpoint cannot be served: missing, not a model, unsupported architecture, missing weights."""

    code = "model"
    exit_code = 2


class ModelMismatchError(ModelError):
    """The queue is bound to another model fingerprint."""

    code = "model_mismatch"


class BrokerError(EmbedqError):
    """Redis cannot be used."""

    code = "broker"
    exit_code = 5


class BrokerUnavailableError(BrokerError):
    """Redis cannot be reached, or the connection was lost and retries ran out."""

    code = "broker_unavailable"


class BrokerAuthError(BrokerError):
    """Redis refused the user or the password, or its ACL forbids a needed command or key."""

    code = "broker_auth"


class BrokerOutOfMemoryError(BrokerError):
    """Redis is at `maxmemory` and refused a write; nothing was written."""

    code = "broker_out_of_memory"


class StorageError(EmbedqError):
    """A file could not be written or made durable: disk full, read-only, input/output error."""

    code = "storage"
    exit_code = 5


class RunNotFoundError(EmbedqError):
    """No run of that name is known to the queue."""

    code = "run_not_found"
    exit_code = 2


class RunConflictError(EmbedqError):
    """Another process drives this run, or the run was started with other options."""

    code = "run_conflict"
    exit_code = 2


class RunEndedError(EmbedqError):
    """The run ended without the outcome that was waited for."""

    code = "run_ended"


class RunFailedError(RunEndedError):
    """The run as a whole could not go on."""

    code = "run_failed"


class RunCancelledError(RunEndedError):
    """The run was cancelled."""

    code = "run_cancelled"


class RunExpiredError(RunEndedError):
    """The run's results are gone: their TTL ended, or the run was given up by its producer."""

    code = "run_expired"


class WaitTimeoutError(EmbedqError):
    """What was waited for did not come within the time allowed; the run goes on unless it was cancelled."""

    code = "timeout"
    exit_code = 4


class NoWorkerError(WaitTimeoutError):
    """The time ran out, and no worker is alive on the queue."""

    code = "no_worker"
    exit_code = 5


class RunIncompleteError(EmbedqError):
    """The command ended before every document had its row; the same command resumes."""

    code = "run_incomplete"
    exit_code = 4


class CodecError(EmbedqError):
    """Bytes from the wire or from a file do not decode to what they claim to be."""

    code = "codec"


class UnsupportedVersionError(CodecError):
    """An entry carries a major schema version or a codec this build does not know."""

    code = "unsupported_version"


class EngineError(EmbedqError):
    """The forward pass failed or returned something that is not an embedding."""

    code = "engine"


class DocumentErrorCode(StrEnum):
    """Why a document has no vector. The value is the `code` column of the run's errors."""

    INVALID_JSON = "invalid_json"  # the line is not one JSON object
    INVALID_UTF8 = "invalid_utf8"  # the line is not UTF-8, or escapes a lone surrogate
    LINE_TOO_LONG = "line_too_long"  # the line, row or file exceeds max_line_bytes
    MISSING_TEXT = "missing_text"  # no text field, or it is null
    INVALID_TEXT = "invalid_text"  # the text is not a string
    INVALID_ID = "invalid_id"  # the id is neither a string nor an integer
    INVALID_METADATA = "invalid_metadata"  # a kept metadata column has a value its type cannot hold
    INVALID_ROW = "invalid_row"  # the row of a CSV file has another number of fields than its header, or broken quotes
    UNREADABLE_FILE = "unreadable_file"  # this file, or the rest of it, is damaged; stands for all its documents
    DUPLICATE_ID = "duplicate_id"  # an earlier document of this run has this id
    INVALID_JOB = "invalid_job"  # the job entry does not decode
    INVALID_BATCH = "invalid_batch"  # the token batch entry does not decode
    INVALID_INPUT_IDS = "invalid_input_ids"  # no token ids, or one outside the model's vocabulary
    TOKENIZER_FAILED = "tokenizer_failed"  # the tokenizer raised on this text
    TOO_LONG = "too_long"  # more tokens than the model's maximum, where truncation is off
    ENGINE_FAILED = "engine_failed"  # the forward pass raised on this document alone
    NOT_FINITE = "not_finite"  # the vector holds NaN or infinity
    UNREADABLE_ERROR = "unreadable_error"  # its dead letter itself does not decode
    MAX_DELIVERIES = "max_deliveries"  # the worker died on this document again and again
