"""A search's verdict again, from what is stored."""

from __future__ import annotations

from rich.table import Table

from rankzero.cli.display.terminal import text_console
from rankzero.tuning.reports import study_run

SHOWN = (
    "trial",
    "state",
    "value",
    "best",
    "samples_per_second",
    "batch_size",
    "precision",
    "lr",
    "reason",
)


def show(storage: str, name: str) -> None:
    """Print the study's trials and its verdict. Raises UserError where there is no such study."""
    from rankzero.tuning.session import CONFIRMATIONS
    from rankzero.tuning.study import find_study
    from rankzero.tuning.verdict.confirm import by_trial

    study = find_study(storage, name)
    terminal = text_console()
    table = Table(title=f"{study.name}: {len(study.trials())} trials", title_justify="left")
    for name in SHOWN:
        table.add_column(
            name, no_wrap=True, overflow="ellipsis", ratio=1 if name == "reason" else None
        )
    for trial in study.trials():
        row = dict(zip(study_run.COLUMNS, study_run.row_of(trial), strict=True))
        table.add_row(*(_cell(row[name]) for name in SHOWN))
    terminal.print(table)
    for number, runs in by_trial(study.facts.get(CONFIRMATIONS, [])).items():
        values = ", ".join(
            "missed" if run.value is None else f"{abs(run.value):.4g}" for run in runs
        )
        terminal.print(f"confirmed  trial {number:3}: {values}")
    if "objective" in study.facts:
        terminal.print(f"objective: {study.facts['objective']}")
    terminal.print(
        study.facts.get("sentence") or "No verdict yet: the same search command goes on."
    )


def _cell(value: object) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
