"""`embedq retry`: open a dataset of `embedq run` again for its failed documents.

A dead letter holds no text, so the documents are read from their corpus again: by the command that made the dataset,
which takes every document from the dataset that has its row there, and sends the others. Here the rows of the chosen
failures are dropped, and the mark of completeness with them.
"""

from __future__ import annotations

from pathlib import Path

from embedq_schemas.errors import RunNotFoundError, UsageError
from embedq_worker.sinks.dataset import dataset_at, is_url
from embedq_worker.sinks.errors import keep_errors, read_errors
from embedq_worker.sinks.files import storage_errors
from embedq_worker.sinks.store import SUCCESS_NAME

from embedq.directory import local_state, owned
from embedq.generation import finish_switch


def reopen(output: str | Path, code: str | None, state: Path | None = None) -> int:
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
    dataset = dataset_at(output if is_url(output) else Path(output).resolve())
    spec = dataset.run_spec()
    if spec is None:
        raise RunNotFoundError(f"{output} holds no run")
    if spec.model_fingerprint is None:
        raise UsageError(f"{output} was not made by embedq run; send its failed documents as a run of their own")
    with owned(dataset, local_state(dataset, state)):
        finish_switch(dataset)
        letters = list(read_errors(dataset))
        chosen = [letter for letter in letters if code is None or letter.code == code]
        if not chosen:
            return 0
        with storage_errors(f"reopen {dataset}"):
            dataset.store.delete([SUCCESS_NAME])
        keep_errors(dataset, {letter.ordinal for letter in letters} - {letter.ordinal for letter in chosen})
        return len(chosen)
