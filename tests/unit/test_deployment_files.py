"""The compose file and its Dockerfiles: they parse, name files that exist, and keep queued work safe."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = sorted(name for name, service in SERVICES.items() if "build" in service)
DOCKERFILES = sorted((ROOT / "docker").iterdir())


def test_the_services_of_a_whole_pipeline_are_there() -> None:
    assert set(SERVICES) == {"redis", "tokenizer", "embedder", "gateway", "producer"}
    assert OURS == ["embedder", "gateway", "producer", "tokenizer"]
    assert SERVICES["producer"]["profiles"] == ["producer"]


def test_redis_is_durable_bounded_and_never_evicts() -> None:
    words = SERVICES["redis"]["command"]
    settings = dict(zip(words[1::2], words[2::2], strict=True))
    assert settings["--appendonly"] == "yes"
    assert settings["--maxmemory-policy"] == "noeviction"
    assert "--maxmemory" in settings
    assert any(volume.endswith(":/data") for volume in SERVICES["redis"]["volumes"])
    assert SERVICES["redis"]["healthcheck"]["test"] == ["CMD", "redis-cli", "ping"]
    assert "ports" not in SERVICES["redis"], "an open port without a password gives every queue away"


@pytest.mark.parametrize("name", OURS)
def test_each_service_builds_from_a_dockerfile_that_exists_and_waits_for_redis(name: str) -> None:
    service = SERVICES[name]
    assert (ROOT / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
    assert service["depends_on"] == {"redis": {"condition": "service_healthy"}}


def test_the_gateway_is_reached_from_this_machine_alone_and_says_whether_it_lives() -> None:
    gateway = SERVICES["gateway"]
    assert all(port.startswith("127.0.0.1:") for port in gateway["ports"])
    assert "/health" in gateway["healthcheck"]["test"][-1]
    assert "EMBEDQ_API_KEYS" in gateway["environment"]


def test_only_the_embedder_asks_for_a_gpu() -> None:
    (device,) = SERVICES["embedder"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    assert not any("deploy" in SERVICES[name] for name in OURS if name != "embedder")


@pytest.mark.parametrize("name", OURS)
def test_every_volume_is_declared_or_below_the_project(name: str) -> None:
    for volume in SERVICES[name]["volumes"]:
        source = volume.partition(":")[0]
        assert source.startswith("./") or source in COMPOSE["volumes"], volume


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_each_dockerfile_installs_the_tested_versions_and_does_not_run_as_root(dockerfile: Path) -> None:
    text = dockerfile.read_text()
    installs = re.findall(r"^RUN pip install .*", text, re.MULTILINE)
    assert installs
    assert all("-c constraints.txt" in install for install in installs)
    assert re.search(r"^USER embedq$", text, re.MULTILINE)


def test_everything_the_distribution_is_built_from_reaches_the_image() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    roots = {Path(package).parts[0] for package in PROJECT["tool"]["hatch"]["build"]["packages"]}
    assert roots | {"pyproject.toml", "constraints.txt", "README.md", "LICENSE"} <= allowed


def test_the_constraints_pin_each_direct_dependency_once() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pins = dict(line.split("==") for line in lines)
    assert len(pins) == len(lines)
    assert pins["torch"] == "2.13.0"
    extras = PROJECT["project"]["optional-dependencies"]
    texts = [*PROJECT["project"]["dependencies"], *extras["worker"], *extras["gateway"], *extras["dev"]]
    requirements = [Requirement(text) for text in texts]
    for requirement in requirements:
        if requirement.name != "embedq":
            pin = pins.get(requirement.name.lower())
            assert pin is not None, f"{requirement.name} is not pinned"
            assert requirement.specifier.contains(pin), f"{requirement} does not allow {pin}"
