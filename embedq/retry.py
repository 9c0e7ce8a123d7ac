"""`embedq retry`: open a dataset of `embedq run` again for its failed documents.

A dead letter holds no text, so the documents are read from their corpus again: by the command that made the dataset,
which takes every document from the dataset that has its row there, and sends the others. Here the rows of the chosen
failures are dropped, and the mark of completeness with them.
"""

from __future__ import annotations

from pathlib import Path

from embedq_schemas.errors import RunNotFoundError, UsageError
from embedq_worker.sinks.dataset import Dataset
from embedq_worker.sinks.errors import keep_errors, read_errors
from embedq_worker.sinks.files import fsync_directory, storage_errors

from embedq.directory import owned
from embedq.generation import finish_switch


def reopen(output: Path, code: str | None) -> int:
    """Drop the error rows of `code` (None: all) so that the run's own command sends those documents again.

    May be killed at any moment: the dataset is incomplete from the first step on, and the command completes it.

    Returns:
        How many documents will be sent again; 0 leaves the dataset as it is.

    Raises:
        RunNotFoundError: `output` holds no run.
        UsageError: the run was not made by `embedq run`.
        RunConflictError: it is going on.
        StorageError: the disk refused.
    """
    dataset = Dataset(output.resolve())
    spec = dataset.run_spec()
    if spec is None:
        raise RunNotFoundError(f"{output} holds no run")
    if spec.model_fingerprint is None:
        raise UsageError(f"{output} was not made by embedq run; send its failed documents as a run of their own")
    with owned(dataset):
        finish_switch(dataset)
        letters = list(read_errors(dataset))
        chosen = [letter for letter in letters if code is None or letter.code == code]
        if not chosen:
            return 0
        with storage_errors(f"reopen {dataset.path}"):
            dataset.success.unlink(missing_ok=True)
            fsync_directory(dataset.path)
        keep_errors(dataset, {letter.ordinal for letter in letters} - {letter.ordinal for letter in chosen})
        return len(chosen)
