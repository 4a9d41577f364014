"""``rankzero prune``: delete old runs, or free the disk of deleted ones."""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from rankzero.catalog import filters, lookup
from rankzero.catalog.attempts import time_of
from rankzero.catalog.summary import ELSEWHERE, Summary, newest_events
from rankzero.cli.commands.runs import size_text
from rankzero.cli.housekeeping.delete import add_confirmation, confirmed, delete, show
from rankzero.errors import FAILED, FINISHED, UserError
from rankzero.housekeeping.deletion import Housekeeper, mark
from rankzero.launch.failures import reason
from rankzero.redaction.text import line_without_secrets
from rankzero.run_store import removal
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.names import printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    best = "keep the N best runs of each experiment and goal"
    add("--keep-best", type=int, metavar="N", help=best)
    old = "only runs that ended so long ago: 12h, 30d"
    add("--older-than", type=_span, metavar="TIME", help=old)
    add("--experiment", metavar="NAME", help="only runs of this MLflow experiment")
    free = "erase deleted runs for good: their folders, and MLflow's files in a local store"
    add("--deleted", action="store_true", help=free)
    add("--dry-run", action="store_true", help="only show what would go")
    add_confirmation(parser)


def run(arguments: argparse.Namespace) -> int:
    best, age = arguments.keep_best, arguments.older_than
    if best is not None and (best < 0 or arguments.deleted):
        raise UserError("--keep-best N takes 0 or more, and is not for --deleted")
    if best is None and age is None and not arguments.deleted:
        raise UserError("say which runs: --keep-best N, --older-than 30d, or --deleted")
    runs, keeper = arguments.dir / "runs", Housekeeper(arguments.discard_undelivered)
    if not arguments.dry_run and (left := removal.tidy(runs)):
        print(f"freed {size_text(left)} that a killed command left")
    known = _known(keeper, runs, deleted=arguments.deleted, dry_run=arguments.dry_run)
    chosen = _chosen(known, best, age, arguments.experiment)
    able = [one.folder for one in chosen if _may_go(keeper, one)]
    if not able:
        is_none = arguments.deleted and not chosen
        print("no deleted run takes up disk" if is_none else "nothing to delete")
        return FINISHED
    if arguments.dry_run:
        show(keeper, able)
        return FINISHED
    remove = _free if arguments.deleted else delete
    return remove(keeper, able, yes=arguments.yes)


def _known(keeper: Housekeeper, runs: Path, *, deleted: bool, dry_run: bool) -> list[Summary]:
    """Return the runs that are deleted, or the others, as their servers have them now.

    A dry run changes no mark.
    """
    gone = lookup.listed(runs, among_deleted=True) if deleted else []
    others = lookup.listed(runs)
    asked = [one for one in gone if one.folder.deleted.exists()]
    asked += [one for one in others if not one.lives]
    changed, errors = keeper.changed_on_servers(one.folder for one in asked)
    for uri, error in errors.items():
        place = f"{uri} does not answer, so its runs stay"
        print(line_without_secrets(f"{place}: {reason(error)}"))
    for one in gone:
        if one.folder.path.name in changed:
            print(f"kept: {printable(one.shown_name)}: it was restored")
    for one in () if dry_run else (*gone, *others):
        if one.folder.path.name not in changed:
            continue
        if one.folder.deleted.exists():
            one.folder.deleted.unlink()
        else:
            mark(one.folder)
    found = [one for one in gone if one.folder.path.name not in changed]
    found += [one for one in others if (one.folder.path.name in changed) == deleted]
    return [
        one
        for one in found
        if one.mlflow_run_id is None or one.folder.identity.tracking_uri not in errors
    ]


def _span(text: str) -> float:
    seconds = filters.seconds(text)
    if seconds is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time: write 90s, 5min, 12h or 30d")
    return seconds


def _chosen(
    runs: Sequence[Summary],
    keep_best: int | None,
    older_than: float | None,
    experiment: str | None,
) -> list[Summary]:
    """Return the runs that are old enough and not among the best.

    Children go with their run. One that is deleted alone looks like one of a run that was deleted
    and restored in MLflow's UI.
    """
    others = [one for one in runs if not (one.lives or _goes_with_another(one))]
    # A run of another machine may still train there, unless somebody deleted it here.
    ended = [one for one in others if one.status != ELSEWHERE or one.folder.deleted.exists()]
    rivals: dict[tuple[str, ...], list[Summary]] = defaultdict(list)
    for one in ended:
        if one.best is not None and one.best == one.best:
            rivals[_contest(one)].append(one)
    # Runs without a value to compare, as studies and runs without a goal, are not worse.
    kept = {
        one.name
        for one in ended
        if keep_best and one.best is None and (one.folder.children or _contest(one) not in rivals)
    }
    for (*_, mode), found in rivals.items():
        sign = -1.0 if mode == "max" else 1.0
        found.sort(key=lambda one: sign * (one.best or 0.0))
        kept |= {one.name for one in found[: keep_best or 0]}
    return [
        one
        for one in ended
        if one.name not in kept
        and (older_than is None or _is_old(one, older_than))
        and experiment in (None, one.experiment)
    ]


def _goes_with_another(one: Summary) -> bool:
    return one.parent is not None and one.folder.path.with_name(one.parent).exists()


def _is_old(one: Summary, seconds: float) -> bool:
    """Return whether the run wrote nothing for so long."""
    ages = [time.time() - one.started - one.seconds]
    # Few runs are so old. The time between two attempts does not count as theirs.
    if ages[0] >= seconds:
        ages += [time.time() - time_of(last) for last in newest_events(one.folder.events)[-1:]]
    return min(ages) >= seconds


def _contest(one: Summary) -> tuple[str, str, str]:
    return one.experiment, one.goal, one.params.get("goal.mode", "min")


def _may_go(keeper: Housekeeper, one: Summary) -> bool:
    """Return whether the run may go. Says why if not."""
    try:
        why = keeper.obstacle(one.folder)
    except Exception as error:  # as an MLflow that does not answer
        # Only an error of this disk names a file.
        is_here = isinstance(error, OSError) and error.filename is not None
        why = "" if is_here else "MLflow does not answer: "
        why = line_without_secrets(f"{why}{reason(error)}")
    if why is not None:
        print(f"kept: {printable(one.shown_name)}: {why}")
    return why is None


def _free(keeper: Housekeeper, folders: Sequence[RunFolder], *, yes: bool) -> int:
    show(keeper, folders)
    if not confirmed("erase them for good", yes=yes):
        return FAILED
    code, freed = FINISHED, 0
    for name, folder in zip(lookup.shown_names(folders), folders, strict=True):
        try:
            count = keeper.bytes(folder)
            if keeper.free(folder):
                freed += count
            else:
                print(f"kept: {name}: it was restored in MLflow")
        except Exception as error:  # the others can be freed nevertheless
            print(line_without_secrets(f"not freed: {name}: {reason(error)}"))
            code = FAILED
    print(f"freed {size_text(freed)}")
    return code
