"""The pages about Kubernetes hold what they say: every launcher file is accepted, every option is explained."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from paceline.experiment.choices import Choice
from paceline.experiment.plugins import parse_options
from paceline.experiment.spec import RunSpec
from paceline.launchers import kubernetes
from paceline.launchers.kubernetes.cluster import cluster_manifests
from paceline.launchers.kubernetes.manifests import job_manifests
from paceline.launchers.kubernetes.options import Options

DOCS = Path(__file__).parents[4] / "docs"
PAGES = ("kubernetes.md", "oke.md")


def launchers_of(page: str) -> list[dict[str, Any]]:
    blocks = re.findall(r"```yaml\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    parsed = [block for text in blocks for block in yaml.safe_load_all(text)]
    return [block for block in parsed if block.get("name") == "kubernetes"]


def test_service_accounts_of_all_pages_are_those_that_are_created() -> None:
    named = {name for page in DOCS.glob("*.md") for name in re.findall(r"--service-account[ =](\S+)", page.read_text())}
    created = {
        each["metadata"]["name"]
        for manifests in cluster_manifests("bench").values()
        for each in manifests
        if each["kind"] == "ServiceAccount"
    }
    assert named
    assert named <= created


@pytest.mark.parametrize("page", PAGES)
def test_every_launcher_file_makes_manifests_that_the_schemas_accept(
    page: str, make_spec: Callable[..., RunSpec]
) -> None:
    found = launchers_of(page)
    assert len(found) >= 2
    for launcher in found:
        given = {key: value for key, value in launcher.items() if key != "name"}
        chosen = parse_options(Options, Choice("kubernetes", given))
        device, processes = ("cuda", chosen.gpus) if chosen.gpus else ("cpu", 1)
        spec = make_spec("ddp", processes, nodes=2, device=device)
        spec = dataclasses.replace(spec, launcher=Choice("kubernetes", given))
        assert kubernetes.check(spec) is None
        for manifest in job_manifests(spec, chosen, "paceline-x", Path("/runs/one"), "1"):
            kubernetes_validate.validate(manifest, "1.36", strict=True)


def test_the_table_lists_every_option_with_its_default() -> None:
    table = re.findall(r"^\| (`.*) \| (.*) \| .* \|$", (DOCS / "kubernetes.md").read_text(), re.MULTILINE)
    told: dict[str, str] = {}
    for names, defaults in table:
        words = re.findall(r"`([a-z_]+)`", names)
        values = defaults.split(", ") if len(words) > 1 and ", " in defaults else [defaults] * len(words)
        told |= dict(zip(words, values, strict=False))
    for option in dataclasses.fields(Options):
        assert option.name in told, option.name
        assert option.name in str(Options.__doc__), option.name
        if isinstance(option.default, int | float) and not isinstance(option.default, bool):
            assert told[option.name] == f"{option.default:g}" or told[option.name] == str(option.default), option.name
        elif isinstance(option.default, str | bool):
            assert (
                told[option.name].strip("`") == str(option.default).lower()
                or told[option.name] == f"`{option.default}`"
            )
