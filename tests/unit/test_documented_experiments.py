"""Experiments that the documentation shows can be planned as they stand, and at least one of their runs be made."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline.campaign.run.references import unsupported
from paceline.errors import RequestError
from paceline.experiment import expansion

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^( *)```yaml\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
# Files of the reader's own.
READERS_OWN = "does not exist"


def experiments() -> dict[str, str]:
    """Blocks of the documentation that have a name and a base, which makes them experiments."""
    found = {}
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))):
        for number, (_, text) in enumerate(BLOCK.findall(page.read_text())):
            if re.match(r"name: ", text) and re.search(r"^base:", text, re.MULTILINE):
                found[f"{page.name}-{number}"] = text
    return found


EXPERIMENTS = experiments()


def test_there_are_some() -> None:
    assert len(EXPERIMENTS) >= 5


@pytest.mark.parametrize("place", EXPERIMENTS)
def test_it_can_be_planned_and_run(place: str, tmp_path: Path) -> None:
    file = tmp_path / "shown.yaml"
    file.write_text(EXPERIMENTS[place])
    try:
        reasons = [unsupported(spec) for spec in expansion.load(str(file))]
    except RequestError as error:
        if READERS_OWN in str(error):
            pytest.skip(str(error))
        raise
    assert None in reasons, reasons
