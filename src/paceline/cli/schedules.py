"""The verb `schedule`: run an experiment regularly, and notice when a run is missed."""

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

from paceline.cli.overview import OK
from paceline.cli.verbs import (
    DEFAULT_OUT,
    Parser,
    add_allow_option,
    add_list_option,
    add_out_option,
    add_verb,
    require_directory,
)
from paceline.errors import RequestError, require

if TYPE_CHECKING:
    from paceline.campaign.schedule.agenda import Schedule, ScheduleView

BACKENDS = ("crontab", "systemd", "kubernetes")
MOST_NEXT = 1000


def add_verbs(verbs: Any) -> None:
    group = add_verb(verbs, "schedule", None, "run an experiment on a cron schedule, then report, compare and notify")
    actions = group.add_subparsers(metavar="ACTION", required=True, parser_class=Parser)

    def action(name: str, call: Callable[[argparse.Namespace], int], text: str, named: bool = False) -> Parser:
        verb = add_verb(actions, name, call, text)
        if named:
            verb.add_argument("name", metavar="NAME", help="name of the schedule")
        add_out_option(verb)
        return verb

    verb = action("add", add, "schedule an experiment")
    verb.add_argument("experiment", metavar="PRESET|FILE", help="as for `paceline run`")
    verb.add_argument(
        "--cron", required=True, metavar="EXPRESSION", help="minute hour day month weekday, such as '0 3 * * *'"
    )
    verb.add_argument("--timezone", default="UTC", metavar="ZONE", help="such as Asia/Seoul (default: %(default)s)")
    verb.add_argument("--name", metavar="NAME", help="default: the name of the experiment")
    verb.add_argument("--replace", action="store_true", help="replace the schedule of that name")
    verb.add_argument("--backend", choices=BACKENDS, default=BACKENDS[0], help="what starts it (default: %(default)s)")
    verb.add_argument("--launcher", metavar="NAME|FILE", help="as for `paceline run`")
    add_list_option(verb, "--set", "KEY=VALUE", "as for `paceline run`")
    add_allow_option(verb, "as for `paceline run`")
    verb.add_argument("--fail-on-regression", type=float, metavar="PCT", help="as for `paceline compare`")
    verb.add_argument("--notify-command", metavar="COMMAND", help="shell command after each run; see docs/schedule.md")
    verb.add_argument(
        "--webhook", metavar="VARIABLE", help="environment variable with the URL to POST to after each run"
    )
    header = "HTTP header, with its value in an environment variable"
    add_list_option(verb, "--webhook-header", "NAME=VARIABLE", header)
    verb.add_argument(
        "--env-file", type=Path, metavar="FILE", help="NAME=VALUE lines; timers do not inherit your environment"
    )
    verb.add_argument("--image", metavar="IMAGE", help="kubernetes: an image with Paceline")
    verb.add_argument("--claim", metavar="NAME", help="kubernetes: PersistentVolumeClaim for the results")
    verb.add_argument("--namespace", metavar="NAME", help="kubernetes: namespace (default: default)")
    verb.add_argument("--service-account", metavar="NAME", help="kubernetes: service account of the pod")
    verb.add_argument("--secret", metavar="NAME", help="kubernetes: Secret with the variables for notifications")
    verb.add_argument("--apply", action="store_true", help="kubernetes: create the objects instead of printing them")
    action("list", show_all, "list the schedules of a results directory")
    verb = action("show", show, "show one schedule: next times, last runs, missed runs", named=True)
    verb.add_argument("--count", type=int, default=5, metavar="N", help="how many of each (default: %(default)s)")
    verb = action("next", show_next, "show the next times of all schedules")
    verb.add_argument("--count", type=int, default=5, metavar="N", help="how many times (default: %(default)s)")
    action("remove", remove, "remove a schedule; its results and history stay", named=True)
    verb = action("run", run, "run a schedule now; timers call this", named=True)
    verb.add_argument(
        "--due-within", type=int, metavar="SECONDS", help="run only if it became due this recently; for timers"
    )
    verb.add_argument("--definition", type=Path, metavar="DIR", help="load the schedule from DIR first; for pods")


def add(arguments: argparse.Namespace) -> int:
    from paceline.campaign import scheduled_run
    from paceline.campaign.schedule import cron, timers
    from paceline.experiment import reading

    # Files are copied to the schedule; presets and launchers given by name have none.
    launcher = arguments.launcher or ""
    experiment_file = None if arguments.experiment in reading.presets() else Path(arguments.experiment)
    launcher_file = Path(launcher) if launcher.endswith((".yaml", ".yml")) else None
    schedule = _schedule(arguments, experiment_file, launcher_file)
    message = scheduled_run.add(arguments.out, schedule, experiment_file, launcher_file, arguments.replace)
    if schedule.env_file is not None and Path(schedule.env_file).stat().st_mode & 0o077:
        print(f"note: other users can read {schedule.env_file}; run `chmod 600` on it", file=sys.stderr)
    due = next(schedule.cron.after(datetime.now(UTC)), None)
    when = f"next {cron.wall(due, schedule.cron.zone)}" if due else "never due"
    printed = schedule.backend == "kubernetes" and not arguments.apply
    # Only the manifest may go to stdout: it is piped into kubectl.
    print(f"schedule {schedule.name}: {when}; {message}", flush=True, file=sys.stderr if printed else sys.stdout)
    if printed:
        print(timers.backend("kubernetes").manifest(arguments.out, schedule), end="")
    return OK


def _schedule(arguments: argparse.Namespace, experiment_file: Path | None, launcher_file: Path | None) -> Schedule:
    """The schedule that was requested, fully checked before anything is written."""
    from paceline.campaign.run.controller import load_own
    from paceline.campaign.schedule import agenda
    from paceline.campaign.schedule.cron import Cron
    from paceline.report.gate import checked_percent

    specs = load_own(arguments.experiment, arguments.set, arguments.launcher, allow=arguments.allow_modules)
    limit, env_file = arguments.fail_on_regression, arguments.env_file
    if env_file is not None:
        require(env_file.is_file(), "--env-file", str(env_file), "a file with NAME=VALUE lines")
    headers = {}
    for text in arguments.webhook_header:
        name, equals, variable = text.partition("=")
        if not equals:
            # The value is not quoted: it may be a secret.
            raise RequestError("--webhook-header: got no '=', expected NAME=VARIABLE with an environment variable.")
        headers[name] = variable
    slug = re.sub(r"[^a-z0-9]+", "-", specs[0].experiment.lower()).strip("-")[:40].strip("-")
    return agenda.Schedule(
        name=arguments.name if arguments.name is not None else slug,
        cron=Cron(" ".join(arguments.cron.split()), arguments.timezone),
        backend=arguments.backend,
        experiment=agenda.EXPERIMENT if experiment_file else arguments.experiment,
        source=arguments.experiment,
        added_at=time.time(),
        directory=str(Path.cwd()),
        settings=tuple(arguments.set),
        launcher=agenda.LAUNCHER if launcher_file else arguments.launcher,
        fail_on_regression=None if limit is None else checked_percent(limit),
        command=arguments.notify_command,
        webhook=arguments.webhook,
        headers=headers,
        env_file=None if env_file is None else str(env_file.absolute()),
        place=_cluster_options(arguments),
    )


def _cluster_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options that only the backend kubernetes uses; an error with any other backend, which would ignore them."""
    fields = {option: option for option in ("image", "claim", "namespace", "secret")} | {"service_account": "account"}
    given = {field: value for option, field in fields.items() if (value := getattr(arguments, option)) is not None}
    if arguments.backend != "kubernetes":
        options = [option for option in (*fields, "apply") if getattr(arguments, option) not in (None, False)]
        if options:
            names = ", ".join(f"--{option.replace('_', '-')}" for option in options)
            raise RequestError(f"{names}: got --backend {arguments.backend}, expected --backend kubernetes.")
        return {}
    if "image" not in given or "claim" not in given:
        raise RequestError("--backend kubernetes: got no --image or no --claim, expected both.")
    from paceline.campaign.schedule.timers.kubernetes import PodSettings

    return dataclasses.asdict(PodSettings(**given, apply=arguments.apply))


def _views(out: Path, now: datetime) -> tuple[list[ScheduleView], list[str]]:
    """All schedules of a directory, and the notes to print after them."""
    from paceline.campaign.schedule import agenda

    # The first run creates the default directory; any other that is missing was mistyped.
    if out.exists() or out != Path(DEFAULT_OUT):
        require_directory(out)
    views, unreadable = agenda.views(out, now)
    return views, unreadable if views or unreadable else [
        f"{out}: no schedules yet; see `paceline schedule add --help`"
    ]


def show_all(arguments: argparse.Namespace) -> int:
    from paceline.campaign.schedule import cron
    from paceline.results import safe_text

    views, notes = _views(arguments.out, datetime.now(UTC))
    for view in views:
        zone = view.schedule.cron.zone
        last = f"last {view.last.outcome}" if view.last else "not run yet"
        following = f"next {cron.wall(view.next, zone)}" if view.next else "never due"
        missed = f", {len(view.missed)} missed" if view.missed else ""
        when = f"{view.schedule.cron.expression} {view.schedule.cron.timezone}"
        print(safe_text.text(f"{view.schedule.name}  {when}  {view.schedule.backend}  {following}  {last}{missed}"))
    for note in notes:
        print(note)
    return OK


def show(arguments: argparse.Namespace) -> int:
    from paceline.campaign.schedule import agenda, cron, tables, timers
    from paceline.results import safe_text

    now = datetime.now(UTC)
    view = agenda.view(arguments.out, arguments.name, now)
    for line in tables.lines(view, _counted(arguments.count)):
        print(safe_text.text(line))
    for due, _ in zip(view.schedule.cron.after(now), range(arguments.count), strict=False):
        print(f"  due {cron.wall(due, view.schedule.cron.zone)}")
    settings = (f"--launcher {view.schedule.launcher}" if view.schedule.launcher else "", *view.schedule.settings)
    print(safe_text.text(f"  runs {view.schedule.source} {' '.join(filter(None, settings))}".rstrip()))
    installed = getattr(timers.backend(view.schedule.backend), "is_installed", None)
    if installed is not None and not installed(arguments.out, view.schedule):
        print(f"  timer missing: add it again with --replace, or run `paceline schedule remove {view.schedule.name}`")
    return OK


def _counted(count: int) -> int:
    require(1 <= count <= MOST_NEXT, "--count", count, f"a whole number from 1 to {MOST_NEXT}")
    return count


def show_next(arguments: argparse.Namespace) -> int:
    import heapq
    import itertools

    from paceline.campaign.schedule import tables

    now, count = datetime.now(UTC), _counted(arguments.count)
    views, notes = _views(arguments.out, now)
    # zip and repeat bind each number now; a generator expression would use the last one of the loop.
    streams = [zip(view.schedule.cron.after(now), itertools.repeat(number)) for number, view in enumerate(views)]
    for due, number in itertools.islice(heapq.merge(*streams), count):
        print(tables.due_text(views[number], due))
    for note in notes:
        print(note)
    return OK


def remove(arguments: argparse.Namespace) -> int:
    from paceline.campaign import scheduled_run
    from paceline.campaign.schedule import agenda

    leftover = scheduled_run.remove(arguments.out, arguments.name)
    print(f"schedule {arguments.name}: removed; its results stay in {agenda.folder_of(arguments.out, arguments.name)}")
    if leftover is not None:
        print(leftover)
    return OK


def run(arguments: argparse.Namespace) -> int:
    from paceline.campaign import scheduled_run
    from paceline.results import safe_text

    if arguments.definition is not None:
        scheduled_run.adopt(arguments.out, arguments.name, arguments.definition)
    within = None if arguments.due_within is None else timedelta(seconds=arguments.due_within)

    def say(text: str) -> None:
        print(safe_text.text(text), flush=True)

    try:
        return scheduled_run.run(arguments.out, arguments.name, within, say)
    except OSError as error:
        raise RequestError(f"--out: cannot write to {arguments.out} ({error.strerror}); nothing was started.") from None
