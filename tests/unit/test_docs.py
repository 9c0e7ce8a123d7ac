"""The documentation names what exists: error codes, commands, files."""

from __future__ import annotations

import re
from pathlib import Path

import embedq_producer.client  # noqa: F401  their errors are part of the tree
import embedq_worker.supervisor  # noqa: F401
import pytest
import typer
from embedq_producer.formats import SUFFIXES, Format
from embedq_schemas.errors import DocumentErrorCode, EmbedqError

from embedq.cli import app
from embedq.dataset.options import ExportOptions
from embedq.options import RunOptions

ROOT = Path(__file__).parents[2]


def leaves(base: type[EmbedqError]) -> set[str]:
    return {base.code}.union(*(leaves(sub) for sub in base.__subclasses__()))


def test_every_error_code_is_documented_and_every_documented_code_exists() -> None:
    page = (ROOT / "docs/cli.md").read_text()
    codes = set(re.findall(r"^\| `([a-z_0-9]+)` \|", page, re.MULTILINE))
    assert codes == leaves(EmbedqError) | {code.value for code in DocumentErrorCode}


def test_every_command_is_documented() -> None:
    page = (ROOT / "docs/cli.md").read_text()
    for name in typer.main.get_command(app).commands:  # type: ignore[attr-defined]
        assert f"`embedq {name}" in page, f"docs/cli.md does not mention embedq {name}"


@pytest.mark.parametrize("page", sorted(ROOT.glob("*.md")) + sorted(ROOT.glob("docs/*.md")), ids=lambda p: p.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which does not exist"


def test_every_format_and_every_suffix_is_documented_and_nothing_else() -> None:
    page = (ROOT / "docs/sources.md").read_text().partition("## Columns")[0]
    rows = re.findall(r"^\| `([a-z]+)` \| (.*?) \|", page, re.MULTILINE)
    assert [name for name, _ in rows] == [format.value for format in Format]
    told = {suffix: name for name, cell in rows for suffix in re.findall(r"`(\.[a-z]+)`", cell)}
    assert told == {suffix: format.value for suffix, format in SUFFIXES.items()}


def test_the_options_and_codes_that_the_sources_page_names_exist() -> None:
    page = (ROOT / "docs/sources.md").read_text()
    known = ((options, name) for options in (RunOptions, ExportOptions) for name in options.model_fields)
    flags = {options.flag(name).partition(",")[0] for options, name in known}
    assert set(re.findall(r"--[a-z][a-z-]*", page)) <= flags
    codes = set(re.findall(r"\(`([a-z_0-9]+)`\)", page.partition("## Columns")[2]))
    assert codes
    assert codes <= {code.value for code in DocumentErrorCode}
