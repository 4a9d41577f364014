"""The report of a run."""

from __future__ import annotations

import math
from pathlib import Path

from rankzero.events import Event, RunStarted, StepsLogged, SystemSampled
from rankzero.reporting.run_facts import fold
from rankzero.reporting.run_report import markdown, page
from rankzero.run_store import checkpoint_files, run_locks
from support.runs import T0, append, deleted, ended, evaluated, make_folder, saved, started, steps


def report(*events: Event, **end: object) -> str:
    return markdown("digits-1", fold(events), ended(**end))  # type: ignore[arg-type]


def test_the_best_value_of_another_machine_is_that_of_its_downloaded_checkpoint(
    tmp_path: Path,
) -> None:
    folder = make_folder(tmp_path)
    append(folder, started(2, step=40), evaluated(50, 0.3, best=False), ended())
    path = checkpoint_files.folder_of(folder.checkpoints, 25)
    checkpoint_files.write(path, Path.touch, 25, {"val/accuracy": 0.6}, True)
    assert "at step 50" not in page(folder)
    (path / checkpoint_files.DOWNLOADED).touch()
    assert "**0.6** at step 25" in page(folder)


def test_the_report_of_a_finished_run(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    text = report(
        started(
            **{
                "train.batch_size": "256",
                "train.precision": "bf16",
                "train.epochs": "5",
                "width": "32",
                "label": "",
            }
        ),
        steps(1, 50),
        StepsLogged([50], [T0 + 50], {"throughput/samples_per_second": [900.0]}),
        evaluated(25, 0.6),
        saved(folder, 25),
        evaluated(50, 0.55, best=False),
        saved(folder, 50, best=False),
        SystemSampled(
            T0, 0, {f"system/gpu_{i}_utilization_percentage": 80.0 + 10 * i for i in range(2)}
        ),
        ended(),
        reason="best val/accuracy 0.6 (target reached)",
        metrics={
            "samples_per_second": 1234.0,
            "samples_per_second_half_width": 5.0,
            "data_wait_fraction": 0.02,
        },
    )
    for line in (
        "### FINISHED: best val/accuracy 0.6 (target reached)",
        "`val/accuracy` **0.6** · **1,234** ± 5 samples/s · 50 of 100 steps · 1 min 40 s",
        "**0.6** at step 25",
        "**reached**",
        "| 85 % |",
        "Steps 25 (best), 50. Continue from the latest:",
        "rankzero resume digits-1 train.epochs=10\n",
        "`bf16`",
        "`label`&emsp; | `''` |",
        "2.0% of the training time",
    ):
        assert line in text, text


def test_a_report_shows_each_setting_that_a_command_has_changed() -> None:
    params = dict.fromkeys(("train.ema", "train.patience"), "none")
    params |= {"train.schedule": "constant", "train.seed": "0"}
    start = {"rankzero.command": "train e.py train.schedule=constant train.seed=0 train.ema=none"}
    text = report(RunStarted(T0, params, start, 1))
    assert "| `train.schedule`&emsp; | `constant` |" in text
    assert text.count("`train.seed`") == 1 and "train.patience" not in text
    assert "| `train.ema`&emsp; | `none` |" in text


def test_a_report_shows_the_size_of_the_model() -> None:
    sizes = {"": "1234567", ".trainable": "1234567", ".by_module": "stem 1,234,000, head 567"}

    def page() -> str:
        tags = {f"rankzero.parameters{key}": value for key, value in sizes.items()}
        return report(RunStarted(T0, {}, tags, 1))

    assert "| 1,234,567 (stem 1,234,000, head 567) |" in page()
    sizes[".trainable"] = "567"
    assert "| 1,234,567, of which 567 are trained (stem" in page()


def test_a_report_says_what_was_not_committed() -> None:
    def origin(dirty: str) -> str:
        tags = {"mlflow.source.git.commit": "abc", "rankzero.dirty": dirty}
        return report(RunStarted(T0, {}, tags, 1))

    assert "| abc |" in origin("false")
    assert "| abc, with uncommitted changes |" in origin("true")
    assert "| abc, with new files that are not committed |" in origin("untracked")
    assert "provenance/diff.patch has in part" in origin("incomplete")


def test_a_run_of_one_step_has_one_step() -> None:
    text = report(RunStarted(T0, {}, {}, 1), steps(1, 1), ended())
    assert "1 step · " in text


def test_a_run_in_steps_is_continued_by_steps(tmp_path: Path) -> None:
    params = {"train.epochs": "10", "train.steps": "100"}
    text = report(started(**params), saved(make_folder(tmp_path), 100), ended())
    assert "rankzero resume digits-1 train.steps=200\n" in text
    stopped = report(started(**params), saved(make_folder(tmp_path), 50), status="KILLED")
    assert "rankzero resume digits-1\n" in stopped


def test_a_failure_shows_the_end_of_its_traceback() -> None:
    text = report(
        started(),
        status="FAILED",
        reason="ValueError: no",
        error="\n".join(f"line {i}" for i in range(100)),
    )
    assert "### FAILED: ValueError: no" in text
    assert "line 99" in text
    assert "line 50" not in text


def test_the_times_of_attempts_are_added() -> None:
    text = report(started(), steps(1, 10), started(2, step=50), steps(51, 60), ended(at=T0 + 60))
    assert "20 s in 2 attempts" in text


def test_deleted_checkpoints_are_left_out(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    text = report(started(), saved(folder, 10), saved(folder, 20), deleted(10))
    assert "Steps 20 (best)." in text


def test_no_text_of_a_user_breaks_the_page() -> None:
    text = report(
        started(evil="a|b\n# big <script>`"),
        evaluated(1, math.nan),
        reason="x | y\n\n# z",
        status="FAILED",
        error="```\n# not a heading",
    )
    assert "a\\|b # big ‹script>'" in text
    assert "### FAILED: x \\| y # z" in text
    assert "'''" in text


def test_a_run_without_steps_has_a_report() -> None:
    assert report(status="FAILED", reason="died") == "### FAILED: died\n"


def test_the_report_names_what_limited_the_speed() -> None:
    def said(wait: float, **params: str) -> str:
        return report(started(**params), metrics={"data_wait_fraction": wait})

    assert "| data: load faster" in said(0.3)
    assert "| compute |" in said(0.01, world_size="1")
    assert "| compute or communication" in said(0.01, world_size="2")
    idle = SystemSampled(T0, 0, {"system/gpu_0_utilization_percentage": 20.0})
    assert "neither data nor arithmetic" in report(
        started(), idle, metrics={"data_wait_fraction": 0.0}
    )


def test_a_run_without_an_end_has_a_report_without_spaces_of_the_page(tmp_path: Path) -> None:
    append(folder := make_folder(tmp_path), started(width="3"), steps(1, 10))
    text = page(folder)
    assert "### DIED: at step 10 of 100" in text
    run_locks.claim(folder, 0)
    assert "### RUNNING: at step 10 of 100" in page(folder)
    assert "&" not in text and "| `width` | `3` |" in text
