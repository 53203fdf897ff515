"""Pages of the documentation: links lead somewhere, every page is in an index, and commands are accepted."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from paceline.cli import command
from paceline.cli.overview import VERBS
from paceline.errors import RequestError
from paceline.experiment import expansion, reading

ROOT = Path(__file__).parents[2]
PAGES = (*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("benchmarks/*.md")))
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """The names by which links reach the headings of a page, as GitHub makes them."""
    text = FENCE.sub("", page.read_text())
    names: set[str] = set(re.findall(r'id="([^"]+)"', text))
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        words = re.sub(r"[`*]|\]\([^)]*\)|\[", "", heading).strip().lower()
        names.add(re.sub(r"[^\w\- ]", "", words).replace(" ", "-"))
    return names


def dead_links() -> Iterator[str]:
    for page in PAGES:
        for link in LINK.findall(CODE.sub("", FENCE.sub("", page.read_text()))):
            if re.match(r"https?:", link):
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
                yield f"{page.relative_to(ROOT)}: {link}"


def test_every_link_leads_to_a_file_and_a_heading() -> None:
    assert list(dead_links()) == []


def test_every_page_is_in_an_index() -> None:
    docs = ROOT / "docs"
    listed = {(docs / link.partition("#")[0]).resolve() for link in LINK.findall((docs / "README.md").read_text())}
    assert {page for page in docs.glob("*.md") if page.name != "README.md"} - listed == set()
    frameworks = docs / "frameworks"
    text = (frameworks / "README.md").read_text()
    listed = {(frameworks / link.partition("#")[0]).resolve() for link in LINK.findall(text)}
    assert {page for page in frameworks.glob("*.md") if page.name != "README.md"} - listed == set()
    measured = docs / "measured"
    text = (measured / "README.md").read_text()
    listed = {(measured / link.partition("#")[0]).resolve() for link in LINK.findall(text)}
    assert set(measured.glob("*/README.md")) - listed == set()


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) < 800


def commands() -> Iterator[tuple[str, list[str]]]:
    """Each documented command line of `paceline` as it was written, and its words without what only a shell reads."""
    for page in PAGES:
        if page.name in ("CHANGELOG.md", "report.md"):  # of earlier versions; generated
            continue
        text = page.read_text()
        lines = [
            line
            for _, kind, block in FENCE.findall(text)
            if kind == ""
            for line in re.sub(r"\\\n", "", block).splitlines()
        ]
        if page == ROOT / "docs" / "README.md":
            lines += [
                code.strip("`") for line in text.splitlines() if line.startswith("|") for code in CODE.findall(line)
            ]
        for line in lines:
            line = re.sub(r"^ *(\w*\$ )?", "", line)
            if not line.startswith("paceline ") or "..." in line:
                continue
            # A comment, an explanation in a column of its own, and what belongs to the shell.
            lexer = shlex.shlex(re.split(r" {3,}|\t", line)[0], posix=True, punctuation_chars="|&><;")
            lexer.whitespace_split = True
            words = []
            for word in lexer:
                if set(word) <= set("|&><;"):
                    break
                words.append(word)
            if not any(re.fullmatch(r"\[.*|.*\]\w*", word) and "=" not in word for word in words):  # a synopsis
                yield f"{page.relative_to(ROOT)}: {line}", words[1:]


COMMANDS = dict(commands())


def test_there_are_many_commands() -> None:
    assert len(COMMANDS) >= 150


def test_the_index_names_every_verb_and_every_preset() -> None:
    text = (ROOT / "docs" / "README.md").read_text()
    assert {verb for verbs in VERBS.values() for verb in verbs if f"`paceline {verb}" not in text} == set()
    assert {preset for preset in reading.presets() if not re.search(rf"`paceline run {preset}[` ]", text)} == set()


def test_every_command_is_accepted() -> None:
    """Verbs and options exist, and so do the presets and the fields that `--set` changes in them."""
    parsers = {verb: command.parser(verb) for verb in {words[0] for words in COMMANDS.values()}}
    presets = reading.presets()
    refused = []
    for line, words in COMMANDS.items():
        try:
            arguments = parsers[words[0]].parse_args(words)
            if words[0] in ("run", "plan") and arguments.experiment in presets and "docs/measured" not in line:
                # Not what an earlier version measured, and without the reader's own files.
                settings = [each for each in arguments.set if "=/" not in each and "path=" not in each]
                expansion.load(arguments.experiment, settings, benchmark=arguments.benchmark)
        except RequestError as error:
            refused.append(f"{line}: {error}")
    assert refused == []


def test_ci_files_are_valid_and_their_commands_accepted() -> None:
    """The YAML of GitHub Actions and GitLab in docs/scripts.md, and every command of ours in its scripts."""
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "scripts.md").read_text(), re.DOTALL)
    jobs = [job for text in blocks if "paceline gate" in text for job in jobs_of(yaml.safe_load(text))]
    assert len(jobs) == 2
    for lines in jobs:
        ours = [line.partition("paceline ")[2].rstrip(")") for line in lines if "paceline " in line]
        assert [line.split()[0] for line in ours] == ["measure", "measure", "gate"]
        for line in ours:
            words = shlex.split(line)
            command.parser(words[0]).parse_args(words)


def jobs_of(document: dict[str, Any]) -> list[list[str]]:
    """The shell lines of each job."""
    if "jobs" in document:
        return [[step["run"] for step in job["steps"] if "run" in step] for job in document["jobs"].values()]
    return [job["script"] for job in document.values()]
