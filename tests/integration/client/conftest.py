"""One queue with workers for all tests of this folder that need one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from services import Service, run_service


@pytest.fixture(scope="package")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with run_service(tmp_path_factory.mktemp("service")) as running:
        yield running
