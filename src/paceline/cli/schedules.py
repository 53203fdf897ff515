"""The verb `schedule`: run an experiment again and again, and know when it did not."""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.verbs import DEFAULT_OUT, OK, Parser, add_verb
from paceline.errors import RequestError

if TYPE_CHECKING:
    from paceline.campaign.schedule.agenda import Schedule, ScheduleView

BACKENDS = ("crontab", "systemd", "kubernetes")
MOST_NEXT = 1000


def add_verbs(verbs: Any) -> None:
    text = "run an experiment at times of a calendar: report, comparison, notification after each"
    verb: Parser = verbs.add_parser("schedule", help=text, description=f"{text[0].upper()}{text[1:]}.")
    actions = verb.add_subparsers(metavar="ACTION", required=True, parser_class=Parser)
    _add_action(actions)
    _action(actions, "list", show_all, "every schedule of a results folder")
    one = _action(actions, "show", show, "one schedule: next times, last runs, missed ones", named=True)
    one.add_argument("--count", type=int, default=5, metavar="N", help="how many of each (default: %(default)s)")
    following = _action(actions, "next", show_next, "when which schedule is due")
    following.add_argument("--count", type=int, default=5, metavar="N", help="how many times (default: %(default)s)")
    _action(actions, "remove", remove, "end a schedule; its results and history stay", named=True)
    ran = _action(actions, "run", run, "run a schedule now; what its timer calls", named=True)
    ran.add_argument("--due-within", type=int, metavar="SECONDS", help="only for a time due so long ago; for timers")
    ran.add_argument("--definition", type=Path, metavar="DIR", help="take the schedule from there first; for pods")


def _action(
    actions: Any, name: str, call: Callable[[argparse.Namespace], int], text: str, named: bool = False
) -> Parser:
    action = add_verb(actions, name, call, text)
    if named:
        action.add_argument("name", metavar="NAME")
    action.add_argument("--out", type=Path, default=Path(DEFAULT_OUT), help="results folder (default: %(default)s)")
    return action


def _add_action(actions: Any) -> None:
    verb = _action(actions, "add", add, "schedule an experiment")
    verb.add_argument("experiment", metavar="PRESET|FILE")
    verb.add_argument("--cron", required=True, metavar="EXPRESSION", help="minute hour day month weekday")
    verb.add_argument("--timezone", default="UTC", metavar="ZONE", help="such as Asia/Seoul (default: %(default)s)")
    verb.add_argument("--name", help="default: the experiment's")
    verb.add_argument("--replace", action="store_true", help="instead of the schedule of that name")
    verb.add_argument("--backend", choices=BACKENDS, default=BACKENDS[0], help="default: %(default)s")
    verb.add_argument("--launcher", metavar="NAME|FILE", help="as for `paceline run`")
    verb.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for `paceline run`")
    verb.add_argument("--fail-on-regression", type=float, metavar="PCT", help="as for `paceline compare`")
    verb.add_argument("--notify-command", metavar="COMMAND", help="shell command after each run; see docs/schedule.md")
    verb.add_argument("--webhook", metavar="VARIABLE", help="variable with the address to POST to after each run")
    verb.add_argument("--webhook-header", action="append", default=[], metavar="NAME=VARIABLE")
    verb.add_argument("--env-file", type=Path, metavar="FILE", help="NAME=VALUE lines; timers know no variables")
    verb.add_argument("--image", help="kubernetes: an image that holds Paceline")
    verb.add_argument("--claim", help="kubernetes: the PersistentVolumeClaim of the results")
    verb.add_argument("--namespace", help="kubernetes: default")
    verb.add_argument("--service-account", help="kubernetes: what the launcher runs as")
    verb.add_argument("--secret", help="kubernetes: the Secret with the variables of notifications")
    verb.add_argument("--apply", action="store_true", help="kubernetes: create the objects, do not print them")


def add(arguments: argparse.Namespace) -> int:
    from paceline.campaign import scheduled_run
    from paceline.campaign.schedule import cron, timers

    made = _schedule(arguments)
    said = scheduled_run.add(
        arguments.out, made, _file(arguments.experiment), _launcher_file(arguments), arguments.replace
    )
    if made.env_file is not None and Path(made.env_file).stat().st_mode & 0o077:
        print(f"note: others may read {made.env_file}; run `chmod 600` on it", file=sys.stderr)
    due = next(made.cron.after(datetime.now(UTC)), None)
    when = f"next {cron.wall(due, made.cron.zone)}" if due else "never due"
    printed = made.backend == "kubernetes" and not arguments.apply
    # What is piped into kubectl is the manifest alone.
    print(f"schedule {made.name}: {when}; {said}", flush=True, file=sys.stderr if printed else sys.stdout)
    if printed:
        print(timers.backend("kubernetes").manifest(arguments.out, made), end="")
    return OK


def _schedule(arguments: argparse.Namespace) -> Schedule:
    """What was asked, all of it understood before anything is written."""
    from paceline.campaign.run.controller import unsupported
    from paceline.campaign.schedule import agenda
    from paceline.campaign.schedule.cron import Cron
    from paceline.experiment import expansion
    from paceline.report.gate import checked_percent

    specs = expansion.load(arguments.experiment, arguments.set, arguments.launcher)
    for spec in specs:
        unsupported(spec)
    limit = arguments.fail_on_regression
    env_file = arguments.env_file
    if env_file is not None and not env_file.is_file():
        raise RequestError(f"--env-file: {str(env_file)!r} was given, which is no file; accepted are NAME=VALUE lines")
    return agenda.Schedule(
        name=arguments.name if arguments.name is not None else _slug(specs[0].experiment),
        cron=Cron(" ".join(arguments.cron.split()), arguments.timezone),
        backend=arguments.backend,
        experiment=agenda.EXPERIMENT if _file(arguments.experiment) else arguments.experiment,
        source=arguments.experiment,
        added_at=time.time(),
        directory=str(Path.cwd()),
        settings=tuple(arguments.set),
        launcher=agenda.LAUNCHER if _launcher_file(arguments) else arguments.launcher,
        fail_on_regression=None if limit is None else checked_percent(limit),
        command=arguments.notify_command,
        webhook=arguments.webhook,
        headers=dict(_header(text) for text in arguments.webhook_header),
        env_file=None if env_file is None else str(env_file.absolute()),
        place=_place(arguments),
    )


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].strip("-")


def _file(source: str) -> Path | None:
    """The file of an experiment, to be kept with the schedule; a preset has none."""
    from paceline.experiment import reading

    return None if source in reading.presets() else Path(source)


def _launcher_file(arguments: argparse.Namespace) -> Path | None:
    given = arguments.launcher or ""
    return Path(given) if given.endswith((".yaml", ".yml")) else None


def _header(text: str) -> tuple[str, str]:
    name, equals, variable = text.partition("=")
    if not equals:
        raise RequestError("--webhook-header: accepted is NAME=VARIABLE, with the name of the variable that holds it")
    return name, variable


def _place(arguments: argparse.Namespace) -> dict[str, Any]:
    """What only a cluster needs; given for another backend it would be believed to count."""
    words = {"image": "image", "claim": "claim", "namespace": "namespace", "service_account": "account"}
    words["secret"] = "secret"
    given = {field: value for option, field in words.items() if (value := getattr(arguments, option)) is not None}
    if arguments.backend != "kubernetes":
        options = [option for option in (*words, "apply") if getattr(arguments, option) not in (None, False)]
        if options:
            named = ", ".join(f"--{option.replace('_', '-')}" for option in options)
            raise RequestError(
                f"{named}: was given with --backend {arguments.backend}; accepted is it with --backend kubernetes only"
            )
        return {}
    if "image" not in given or "claim" not in given:
        raise RequestError("--backend kubernetes: accepted is one with --image IMAGE and --claim CLAIM")
    from paceline.campaign.schedule.timers.kubernetes import Place

    return dataclasses.asdict(Place(**given, apply=arguments.apply))


def _views(out: Path, now: datetime) -> tuple[list[ScheduleView], list[str]]:
    """All schedules of a folder; where there are none, a sentence that says how to begin."""
    from paceline.campaign.schedule import agenda

    # The usual folder is made by the first run; any other that is not there was mistyped.
    if not out.is_dir() and (out.exists() or out != Path(DEFAULT_OUT)):
        raise RequestError(f"--out: {str(out)!r} was given, which is no folder; accepted is a results folder")
    views, unreadable = agenda.views(out, now)
    return views, unreadable if views or unreadable else [f"{out}: no schedule yet; `paceline schedule add --help`"]


def show_all(arguments: argparse.Namespace) -> int:
    from paceline.campaign.schedule import cron
    from paceline.results import safe_text

    views, sentences = _views(arguments.out, datetime.now(UTC))
    for view in views:
        zone = view.schedule.cron.zone
        last = f"last {view.last.outcome}" if view.last else "not run yet"
        following = f"next {cron.wall(view.next, zone)}" if view.next else "never due"
        lost = f", {len(view.missed)} missed" if view.missed else ""
        when = f"{view.schedule.cron.expression} {view.schedule.cron.timezone}"
        print(safe_text.text(f"{view.schedule.name}  {when}  {view.schedule.backend}  {following}  {last}{lost}"))
    for sentence in sentences:
        print(sentence)
    return OK


def show(arguments: argparse.Namespace) -> int:
    from paceline.campaign.schedule import agenda, cron, timers
    from paceline.campaign.schedule import tables as present
    from paceline.results import safe_text

    now = datetime.now(UTC)
    view = agenda.view(arguments.out, arguments.name, now)
    for line in present.lines(view, _counted(arguments.count)):
        print(safe_text.text(line))
    for due, _ in zip(view.schedule.cron.after(now), range(arguments.count), strict=False):
        print(f"  due {cron.wall(due, view.schedule.cron.zone)}")
    asked = (f"--launcher {view.schedule.launcher}" if view.schedule.launcher else "", *view.schedule.settings)
    print(safe_text.text(f"  runs {view.schedule.source} {' '.join(filter(None, asked))}".rstrip()))
    installed = getattr(timers.backend(view.schedule.backend), "is_installed", None)
    if installed is not None and not installed(arguments.out, view.schedule):
        print(f"  its timer is gone: add it again with --replace, or `paceline schedule remove {view.schedule.name}`")
    return OK


def _counted(count: int) -> int:
    if not 1 <= count <= MOST_NEXT:
        raise RequestError(f"--count: {count} was given; accepted is a whole number from 1 to {MOST_NEXT}")
    return count


def show_next(arguments: argparse.Namespace) -> int:
    import heapq
    import itertools

    from paceline.campaign.schedule import tables as present

    now, count = datetime.now(UTC), _counted(arguments.count)
    views, sentences = _views(arguments.out, now)
    # zip and repeat bind each number at once; a generator would read the loop's last one.
    streams = [zip(view.schedule.cron.after(now), itertools.repeat(number)) for number, view in enumerate(views)]
    for due, number in itertools.islice(heapq.merge(*streams), count):
        print(present.due_text(views[number], due))
    for sentence in sentences:
        print(sentence)
    return OK


def remove(arguments: argparse.Namespace) -> int:
    from paceline.campaign import scheduled_run
    from paceline.campaign.schedule import agenda

    left = scheduled_run.remove(arguments.out, arguments.name)
    print(f"schedule {arguments.name}: removed; its results stay in {agenda.folder_of(arguments.out, arguments.name)}")
    if left is not None:
        print(left)
    return OK


def run(arguments: argparse.Namespace) -> int:
    from paceline.campaign import scheduled_run

    if arguments.definition is not None:
        scheduled_run.adopt(arguments.out, arguments.name, arguments.definition)
    within = None if arguments.due_within is None else timedelta(seconds=arguments.due_within)
    try:
        return scheduled_run.run(arguments.out, arguments.name, within, _say)
    except OSError as error:
        raise RequestError(
            f"--out: {arguments.out} cannot be written ({error.strerror}); nothing was started"
        ) from None


def _say(text: str) -> None:
    from paceline.results import safe_text

    print(safe_text.text(text), flush=True)
