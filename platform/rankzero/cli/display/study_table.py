"""A search's verdict, printed again from the study's database."""

from __future__ import annotations

from rich.table import Table

from rankzero.cli.display.terminal import text_console
from rankzero.tuning.reports.study_run import SHOWN_COLUMNS, row_of

_SHOWN = (*SHOWN_COLUMNS, "reason")


def show(storage: str, name: str) -> None:
    """Print the study's trials and its verdict. Raises UserError for an unknown study."""
    from rankzero.tuning.session import CONFIRMATIONS
    from rankzero.tuning.study import find_study
    from rankzero.tuning.verdict.confirm import by_trial

    study = find_study(storage, name)
    trials, facts, terminal = study.trials(), study.facts, text_console()
    table = Table(title=f"{study.name}: {len(trials)} trials", title_justify="left")
    for column in _SHOWN:
        ratio = 1 if column == "reason" else None
        table.add_column(column, no_wrap=True, overflow="ellipsis", ratio=ratio)
    for trial in trials:
        row = row_of(trial)
        table.add_row(*(_cell(row[column]) for column in _SHOWN))
    terminal.print(table)
    for number, runs in by_trial(facts.get(CONFIRMATIONS, [])).items():
        shown = ["missed" if run.value is None else f"{abs(run.value):.4g}" for run in runs]
        terminal.print(f"confirmed  trial {number:3}: {', '.join(shown)}")
    if "objective" in facts:
        terminal.print(f"objective: {facts['objective']}")
    terminal.print(facts.get("sentence") or "No verdict yet: the same search command resumes it.")


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
