"""Verbs about a Kubernetes cluster: make a namespace ready for runs, and say what is missing."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.verbs import OK, SOME_FAILED, Parser, add_verb
from paceline.errors import RequestError

if TYPE_CHECKING:
    from paceline.launchers.kubernetes.options import Options

DEFAULT_NAMESPACE = "paceline"
PATIENCE_S = 10.0
MARKS = {True: "ok  ", None: "note", False: "BAD "}


def add_verbs(verbs: Any) -> None:
    group = verbs.add_parser("cluster", help="a Kubernetes cluster: make it ready for runs, find what is missing")
    inner = group.add_subparsers(metavar="ACTION", required=True, parser_class=Parser)
    verb = add_verb(inner, "init", init, "the namespace, rights and walls that runs need, as YAML or applied")
    verb.add_argument("--namespace", default=DEFAULT_NAMESPACE, metavar="NAME")
    verb.add_argument(
        "--kind", action="append", metavar="KIND", help="job (default), jobset or trainjob: which rights are given"
    )
    verb.add_argument("--quota", action="append", default=[], metavar="KEY=VALUE", help="such as pods=8")
    verb.add_argument("--image", metavar="IMAGE", help="also write a smoke job that starts it")
    where = verb.add_mutually_exclusive_group()
    where.add_argument("--out", type=Path, metavar="DIR", help="write files there; without it they are printed")
    where.add_argument("--apply", action="store_true", help="create or update everything now")
    verb.add_argument("--context", metavar="NAME", help="of the kubeconfig")
    verb = add_verb(inner, "check", check, "say whether a cluster is fit for runs, and how to mend it")
    verb.add_argument("--launcher", default="kubernetes", metavar="NAME|FILE", help="kubernetes with its options")
    verb.add_argument("--no-pods", action="store_true", help="ask the API server only; start nothing")
    verb.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="for the pods that are started")
    verb.add_argument("--json", action="store_true", help="one JSON document")


def init(arguments: argparse.Namespace) -> int:
    from paceline.launchers.kubernetes.cluster import cluster_manifests, smoke_job
    from paceline.launchers.kubernetes.options import KINDS, Options

    kinds = arguments.kind or ["job"]
    wrong = [kind for kind in kinds if kind not in KINDS]
    if wrong:
        raise RequestError(f"--kind: got {wrong[0]!r}, expected {', '.join(KINDS)}.")
    try:
        chosen = Options(namespace=arguments.namespace, image=arguments.image)
    except RequestError as wrong:
        # The options of the launcher are checked there; here the user has written them as words of this verb.
        raise RequestError(f"--{str(wrong).removeprefix('kubernetes.')}") from None
    files = cluster_manifests(arguments.namespace, kinds, _quota(arguments.quota))
    if arguments.apply:
        from paceline.launchers.kubernetes.client import Cluster

        cluster = Cluster.reach(arguments.context, arguments.namespace, PATIENCE_S)
        print("\n".join(cluster.apply(each for made in files.values() for each in made)))
        return OK
    if arguments.image:
        files["smoke/job.yaml"] = [smoke_job(chosen, arguments.namespace)]
    _hand_out(files, arguments.out)
    return OK


def _hand_out(files: dict[str, list[dict[str, Any]]], out: Path | None) -> None:
    import yaml

    for name, made in files.items():
        text = yaml.safe_dump_all(made, sort_keys=False, explicit_start=True)
        if out is None:
            print(text, end="")
            continue
        try:
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).write_text(text)
        except OSError as error:
            why = error.strerror or type(error).__name__
            raise RequestError(f"--out: {out} cannot be written to ({why}); accepted is a folder") from None
        print(out / name)


def _quota(given: list[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in given]
    for text, (key, equals, value) in zip(given, pairs, strict=True):
        if not (key and equals and value):
            raise RequestError(f"--quota: {text!r} was given; accepted is KEY=VALUE, such as pods=8")
    return {key: value for key, _, value in pairs}


def check(arguments: argparse.Namespace) -> int:
    from paceline.launchers.kubernetes.client import Cluster
    from paceline.launchers.kubernetes.cluster import survey

    chosen = _options(arguments.launcher)
    if arguments.timeout <= 0:
        raise RequestError(f"--timeout: {arguments.timeout} was given; accepted is a positive number of seconds")
    cluster = Cluster.reach(chosen.context, chosen.namespace, PATIENCE_S)
    found = []
    for item in survey(cluster, chosen, limit_s=arguments.timeout, pods=not arguments.no_pods):
        found.append(item)
        if not arguments.json:
            fix = f"\n       fix: {item.fix}" if item.fix else ""
            print(f"{MARKS[item.ok]} {item.name}: {item.text}{fix}", flush=True)
    if arguments.json:
        print(json.dumps({"namespace": cluster.namespace, "checks": [asdict(item) for item in found]}, indent=2))
    return SOME_FAILED if any(item.ok is False for item in found) else OK


def _options(text: str) -> Options:
    from paceline.experiment.choices import Choice
    from paceline.experiment.expansion import given_launcher
    from paceline.experiment.plugins import parse_options
    from paceline.launchers.kubernetes.options import Options

    choice = Choice.parse(given_launcher(text, None))
    if choice.name != "kubernetes":
        raise RequestError(f"--launcher: {choice.name!r} was given; accepted is kubernetes, with its options")
    return parse_options(Options, choice)
