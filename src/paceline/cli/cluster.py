"""Verbs that prepare a cluster: the namespace for runs, its checks, and the container image."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.cli.overview import OK, SOME_FAILED
from paceline.cli.verbs import Parser, add_list_option, add_verb, print_checks
from paceline.errors import RequestError, require

DEFAULT_NAMESPACE = "paceline"
PATIENCE_S = 10.0


def add_verbs(verbs: Any) -> None:
    group = add_verb(verbs, "cluster", None, "prepare a Kubernetes namespace for runs, or check one")
    actions = group.add_subparsers(metavar="ACTION", required=True, parser_class=Parser)
    verb = add_verb(
        actions, "init", init, "write or apply the namespace, permissions and network policy that runs need"
    )
    verb.add_argument("--namespace", default=DEFAULT_NAMESPACE, metavar="NAME", help="default: %(default)s")
    verb.add_argument(
        "--kind", action="append", metavar="KIND", help="allow this kind of job: job (default), jobset or trainjob"
    )
    add_list_option(verb, "--quota", "KEY=VALUE", "resource quota, such as pods=8")
    verb.add_argument("--image", metavar="IMAGE", help="also write a smoke-test job that starts this image")
    target = verb.add_mutually_exclusive_group()
    target.add_argument("--out", type=Path, metavar="DIR", help="write files to DIR instead of printing them")
    target.add_argument("--apply", action="store_true", help="create or update everything now")
    verb.add_argument("--context", metavar="NAME", help="context of the kubeconfig")
    verb = add_verb(actions, "check", check, "check whether a cluster can run jobs, and suggest fixes")
    verb.add_argument(
        "--launcher", default="kubernetes", metavar="NAME|FILE", help="kubernetes with its options, or a YAML file"
    )
    verb.add_argument("--no-pods", action="store_true", help="query the API server only, start no pods")
    verb.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECONDS", help="limit for the test pods (default: %(default)s)"
    )
    verb.add_argument("--json", action="store_true", help="print one JSON document")

    group = add_verb(verbs, "image", None, "build or verify the container image")
    actions = group.add_subparsers(metavar="ACTION", required=True, parser_class=Parser)
    verb = add_verb(actions, "build", build, "build the image with docker, podman or buildah")
    verb.add_argument("tag", metavar="NAME:TAG", help="name of the new image")
    verb.add_argument("--base", metavar="IMAGE", help="another base image, preferably NAME@sha256:...")
    verb.add_argument("--dry-run", action="store_true", help="print the build command, run nothing")
    verify_verb = add_verb(
        actions, "verify", verify, "run an image and check its user, tools, versions and directories"
    )
    verify_verb.add_argument("image", metavar="NAME:TAG", help="the image to verify")
    for each in (verb, verify_verb):
        each.add_argument("--engine", metavar="NAME", help="docker, podman or buildah (default: the first installed)")
        each.add_argument(
            "--context", type=Path, default=Path(), metavar="DIR", help="a checkout of Paceline (default: here)"
        )
    add_verb(actions, "facts", facts, "inside a container: print facts about the image as JSON")


def init(arguments: argparse.Namespace) -> int:
    from paceline.launchers.kubernetes.cluster import cluster_manifests, smoke_job
    from paceline.launchers.kubernetes.options import KINDS, Options

    kinds = arguments.kind or ["job"]
    for kind in kinds:
        require(kind in KINDS, "--kind", kind, ", ".join(KINDS))
    try:
        options = Options(namespace=arguments.namespace, image=arguments.image)
    except RequestError as wrong:
        # The message names an option of the launcher; the user wrote it as an option of this verb.
        raise RequestError(f"--{str(wrong).removeprefix('kubernetes.')}") from None
    quota = {}
    for text in arguments.quota:
        key, _, value = text.partition("=")
        require(bool(key and value), "--quota", text, "KEY=VALUE, such as pods=8")
        quota[key] = value
    files = cluster_manifests(arguments.namespace, kinds, quota)
    if arguments.apply:
        from paceline.launchers.kubernetes.client import Cluster

        cluster = Cluster.reach(arguments.context, arguments.namespace, PATIENCE_S)
        print("\n".join(cluster.apply(manifest for manifests in files.values() for manifest in manifests)))
        return OK
    if arguments.image:
        files["smoke/job.yaml"] = [smoke_job(options, arguments.namespace)]

    import yaml

    for name, manifests in files.items():
        text = yaml.safe_dump_all(manifests, sort_keys=False, explicit_start=True)
        if arguments.out is None:
            print(text, end="")
            continue
        path = arguments.out / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise RequestError(f"--out: cannot write to {arguments.out} ({reason}), expected a directory.") from None
        print(path)
    return OK


def check(arguments: argparse.Namespace) -> int:
    from paceline.experiment import plugins
    from paceline.experiment.choices import Choice
    from paceline.experiment.expansion import given_launcher
    from paceline.launchers.kubernetes.client import Cluster
    from paceline.launchers.kubernetes.cluster import survey
    from paceline.launchers.kubernetes.options import Options

    launcher = Choice.parse(given_launcher(arguments.launcher, None))
    require(launcher.name == "kubernetes", "--launcher", launcher.name, "kubernetes, with its options")
    options = plugins.parse_options(Options, launcher)
    require(arguments.timeout > 0, "--timeout", arguments.timeout, "a positive number of seconds")
    cluster = Cluster.reach(options.context, options.namespace, PATIENCE_S)
    checks = []
    for item in survey(cluster, options, limit_s=arguments.timeout, pods=not arguments.no_pods):
        checks.append(item)
        if not arguments.json:
            print_checks([item])
    if arguments.json:
        print(json.dumps({"namespace": cluster.namespace, "checks": [asdict(item) for item in checks]}, indent=2))
    return SOME_FAILED if any(item.ok is False for item in checks) else OK


def build(arguments: argparse.Namespace) -> int:
    import shlex
    import subprocess

    from paceline.launchers import image

    engine = "docker" if arguments.dry_run and not arguments.engine else image.engine(arguments.engine)
    command = image.build_command(engine, arguments.context, arguments.tag, arguments.base)
    if arguments.dry_run:
        print(shlex.join(command))
        return OK
    return SOME_FAILED if subprocess.run(command, check=False).returncode else OK


def verify(arguments: argparse.Namespace) -> int:
    from paceline.launchers import image

    constraints = arguments.context / "constraints.txt"
    if not constraints.is_file():
        raise RequestError(
            f"--context: got {str(arguments.context)!r}, expected a checkout of Paceline with constraints.txt."
        )
    facts = image.ask(image.engine(arguments.engine), image.checked(arguments.image))
    problems = image.problems(facts, constraints.read_text(encoding="utf-8"))
    for problem in problems:
        print(f"BAD  {problem}")
    if not problems:
        print(f"ok   {arguments.image}: Paceline {facts['paceline']}, torch {facts['versions']['torch']}, ", end="")
        print(f"user {facts['uid']}, no build tools, {len(facts['versions'])} packages")
    return SOME_FAILED if problems else OK


def facts(arguments: argparse.Namespace) -> int:
    from paceline.launchers import image

    print(json.dumps(image.facts(), indent=1))
    return OK
