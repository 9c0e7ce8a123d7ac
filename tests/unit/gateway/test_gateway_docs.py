"""docs/gateway.md names what exists: routes, flags, error codes, metrics."""

from __future__ import annotations

import re
from pathlib import Path

from embedq_broker.settings import BrokerSettings
from embedq_gateway.app import create_app
from embedq_gateway.gateway import Gateway
from embedq_gateway.settings import GatewaySettings

from embedq.serve import ServeOptions

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/gateway.md").read_text()
SOURCE = "\n".join(path.read_text() for path in sorted((ROOT / "gateway").rglob("*.py")))


def test_every_route_is_documented_and_every_documented_route_exists(tmp_path: Path) -> None:
    app = create_app(Gateway(GatewaySettings(data_dir=tmp_path), BrokerSettings()))
    routes = {f"{method.upper()} {path}" for path, methods in app.openapi()["paths"].items() for method in methods} | {
        "GET /openapi.json"
    }
    table = PAGE.partition("\n## Routes\n")[2].partition("\n### ")[0]
    assert set(re.findall(r"`((?:GET|POST|DELETE) /[^`]*)`", table)) == routes


def test_every_flag_that_is_named_exists() -> None:
    flags = {ServeOptions.flag(name).partition(",")[0] for name in ServeOptions.model_fields}
    assert set(re.findall(r"--[a-z][a-z-]+", PAGE)) <= flags | {"--help"}


def test_every_code_is_documented() -> None:
    patterns = (
        r'(?:ApiError|LineError)\(\s*(?:\d+,\s*)?"(\w+)"',
        r'BatchError\(\s*code="(\w+)"',
        r'\("(batch_\w+|result_\w+)",',
    )
    codes = {code for pattern in patterns for code in re.findall(pattern, SOURCE)}
    assert len(codes) > 40
    assert {code for code in codes if f"`{code}`" not in PAGE} == set()


def test_every_metric_is_documented(tmp_path: Path) -> None:
    gateway = Gateway(GatewaySettings(data_dir=tmp_path), BrokerSettings())
    families = gateway.metrics.registry.collect()
    names = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    assert set(re.findall(r"`(embedq_gateway_\w+)`", PAGE)) == names
