"""Verbs about the container image: build it, look into it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from paceline.cli.verbs import OK, SOME_FAILED, add_verb
from paceline.errors import RequestError


def add_verbs(verbs: Any) -> None:
    group = verbs.add_parser("image", help="build the container image, or verify one before it is used")
    actions = group.add_subparsers(metavar="ACTION", required=True, parser_class=type(group))
    verb = add_verb(actions, "build", build, "build the image with docker, podman or buildah")
    verb.add_argument("tag", metavar="NAME:TAG")
    verb.add_argument("--base", metavar="IMAGE", help="another base image, best NAME@sha256:...")
    _add_engine(verb)
    verb.add_argument("--dry-run", action="store_true", help="print the engine's command")
    verb = add_verb(actions, "verify", verify, "run an image and check user, tools, versions and folders")
    verb.add_argument("image", metavar="NAME:TAG")
    _add_engine(verb)
    add_verb(actions, "facts", facts, "inside an image: what it is, as JSON")


def _add_engine(verb: Any) -> None:
    verb.add_argument("--engine", metavar="NAME", help="docker, podman or buildah; the first that is there")
    verb.add_argument("--context", type=Path, default=Path(), metavar="DIR", help="a checkout of Paceline")


def build(arguments: argparse.Namespace) -> int:
    import shlex
    import subprocess

    from paceline.launchers import image

    chosen = "docker" if arguments.dry_run and not arguments.engine else image.engine(arguments.engine)
    command = image.build_command(chosen, arguments.context, arguments.tag, arguments.base)
    if arguments.dry_run:
        print(shlex.join(command))
        return OK
    return SOME_FAILED if subprocess.run(command, check=False).returncode else OK


def verify(arguments: argparse.Namespace) -> int:
    from paceline.launchers import image

    constraints = arguments.context / "constraints.txt"
    if not constraints.is_file():
        raise RequestError(f"--context: {str(arguments.context)!r} was given, which has no constraints.txt")
    found = image.ask(image.engine(arguments.engine), image.checked(arguments.image))
    wrong = image.problems(found, constraints.read_text())
    for sentence in wrong:
        print(f"BAD  {sentence}")
    if not wrong:
        print(f"ok   {arguments.image}: Paceline {found['paceline']}, torch {found['versions']['torch']}, ", end="")
        print(f"user {found['uid']}, no build tools, {len(found['versions'])} packages")
    return SOME_FAILED if wrong else OK


def facts(arguments: argparse.Namespace) -> int:
    import json

    from paceline.launchers import image

    print(json.dumps(image.facts(), indent=1))
    return OK
