"""What a service imports: nothing until it uses the client, and never what only workers need."""

from __future__ import annotations

import subprocess
import sys

import embedq

HEAVY = ("torch", "transformers", "tokenizers", "gigatoken", "safetensors", "embedq_worker", "fastapi")


def loaded(program: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after `program`."""
    listed = f"{program}\nimport sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    return set(
        subprocess.run([sys.executable, "-c", listed], capture_output=True, text=True, check=True).stdout.split()
    )


def test_importing_embedq_loads_nothing() -> None:
    assert not {"redis", "pyarrow", "numpy", "pydantic", "embedq_producer", *HEAVY} & loaded("import embedq")


def test_the_client_loads_nothing_of_the_workers() -> None:
    assert not set(HEAVY) & loaded("import embedq; embedq.Client; embedq.AsyncClient")


def test_every_name_of_the_front_door_is_there() -> None:
    for name in embedq.__all__:
        assert getattr(embedq, name).__name__ == name
    assert not hasattr(embedq, "Nothing")
