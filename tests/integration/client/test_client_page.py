"""docs/client.md: every example runs, as it stands, against a queue with workers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from services import Service

PAGE = Path(__file__).parents[3] / "docs/client.md"
EXAMPLES = re.findall(r"^## (.+?)$|```python\n(.*?)```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def examples() -> list[tuple[str, str]]:
    """(heading and number, code) of each example."""
    found, heading = [], ""
    for title, code in EXAMPLES:
        heading = title or heading
        if code:
            found.append((f"{heading} {len(found)}", code))
    return found


@pytest.mark.parametrize("code", [code for _, code in examples()], ids=[name for name, _ in examples()])
def test_an_example_of_the_page_runs(
    service: Service, code: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EMBEDQ_REDIS_URL", service.settings.redis_url)
    monkeypatch.setenv("EMBEDQ_QUEUE", service.settings.queue)
    exec(compile(code, str(PAGE), "exec"), {"__name__": "example"})
    assert capsys.readouterr().out.strip()
