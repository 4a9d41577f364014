"""The differences between two runs, and the commands that repeat one."""

from __future__ import annotations

import dataclasses

from rankzero.events import DataDescribed, SystemSampled
from rankzero.reporting import comparison, reproduce
from rankzero.reporting.comparison import RunSide, sections
from rankzero.reporting.run_facts import fold
from support.runs import T0, ended, evaluated, started, steps

PATCH = "diff --git a/x.py b/x.py\n--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-old\n+new {}\n"


def begun(command: str = "", attempt: int = 1, **environment: str) -> object:
    tags = {
        "rankzero.command": command,
        **{key.replace("__", "."): text for key, text in environment.items()},
    }
    return dataclasses.replace(started(attempt), environment=tags)


def side(*events: object, **changes: object) -> RunSide:
    one = RunSide("one", "FINISHED", fold(events), {"torch": "2.15", "numpy": "2.4"}, "")  # type: ignore[arg-type]
    return dataclasses.replace(one, **changes)  # type: ignore[arg-type]


def test_only_differences_are_shown() -> None:
    left = side(
        started(lr="0.1"),
        steps(1, 4),
        evaluated(4, 0.5),
        ended(metrics={"samples_per_second": 100.0}),
    )
    right = side(
        started(lr="0.2"),
        steps(1, 4),
        evaluated(4, 0.6),
        ended(metrics={"samples_per_second": 250.0}),
        packages={"torch": "2.15", "scipy": "1"},
    )
    found = {
        title: {row.key: row for row in rows} for title, rows in sections([left, right]).items()
    }
    assert found["Settings"].keys() == {"lr"} and found["Packages"].keys() == {"numpy", "scipy"}
    assert (
        found["Result"]["best val/accuracy"].change == "+20.0%"
        and "train/loss" not in found["Result"]
    )
    assert found["Speed"]["samples/s"] == comparison.ComparisonRow(
        "samples/s", ("100", "250"), "2.50x"
    )
    assert "Machine" not in found and not sections([left, left])
    assert sections([left, left], everything=True).keys() >= {"Result", "Settings", "Code"}


def test_the_end_of_a_schedule_is_no_result_and_a_wait_is_in_percent() -> None:
    sides = [
        side(started(), steps(1, 4, "lr", wait), evaluated(step, 0.5), ended(metrics=metrics))
        for step, wait in ((3, 0.02), (4, 0.04))
        for metrics in [{"data_wait_fraction": wait}]
    ]
    found = {title: {row.key: row for row in rows} for title, rows in sections(sides).items()}
    assert "lr" not in found["Result"] and found["Result"]["best at step"].change == ""
    wait = found["Speed"]["waiting for data, %"]
    assert (wait.values, wait.change) == (("2", "4"), "2.00x")


def test_results_that_differ_in_a_late_digit_are_a_difference() -> None:
    sides = [side(started(), evaluated(4, value)) for value in (0.123412, 0.123449)]
    rows = {row.key: row.values for row in sections(sides)["Result"]}
    assert rows["val/accuracy"] == ("0.12341", "0.12345")


def test_other_data_are_a_difference() -> None:
    def data(digest: str) -> DataDescribed:
        return DataDescribed(T0, "training", "Mine", digest, "all", "code", "e.py", 1500, {})

    left, right = side(started(), data("d1")), side(started(), data("d2"))
    assert not sections([left, left])
    (row,) = sections([left, right])["Data"]
    shown = tuple(f"Mine, 1,500 samples, digest {digest}" for digest in ("d1", "d2"))
    assert (row.key, row.values) == ("training", shown)


def test_a_change_of_the_sign_has_no_factor() -> None:
    def change(before: float, after: float) -> str:
        (row,) = [
            row
            for row in sections([side(started(), evaluated(4, v)) for v in (before, after)])[
                "Result"
            ]
            if row.key == "val/accuracy"
        ]
        return row.change

    assert change(0.8651, -9.587) == change(-2.0, 1.0) == change(2.0, 0.0) == ""
    assert change(2.0, 5.0) == "2.50x" and change(-2.0, -2.2) == "+10.0%"


def test_a_speed_within_its_intervals_has_no_change() -> None:
    def change(*halves: float | None) -> str:
        sides = []
        for speed, half in zip((16802.0, 12002.0), halves, strict=True):
            margin = {} if half is None else {"samples_per_second_half_width": half}
            sides.append(side(started(), ended(metrics={"samples_per_second": speed, **margin})))
        (row,) = sections(sides)["Speed"]
        return row.change

    assert change(20769.0, 90.0) == change(20769.0, None) == change(4000.0, 900.0) == ""
    assert change(80.0, 90.0) == change(None, None) == "-28.6%"


def test_the_counted_energy_has_no_mean() -> None:
    def sampled(watts: float) -> RunSide:
        counts = ({"power_usage_watts": watts, "energy_joules": watts * n} for n in range(3))
        samples = ({f"system/gpu_0_{name}": v for name, v in one.items()} for one in counts)
        return side(*(SystemSampled(T0 + n, n, one) for n, one in enumerate(samples)))

    (row,) = sections([sampled(100.0), sampled(200.0)])["Speed"]
    assert row.key == "GPU power usage watts"


def test_the_first_minute_weighs_as_much_as_any_other_in_a_gpus_mean() -> None:
    key, times = "system/gpu_0_utilization_percentage", [*range(2, 61, 2), *range(65, 301, 5)]
    samples = [SystemSampled(T0 + at, at, {key: 98.0 * (at > 60)}) for at in times]
    # As of two nodes, one after the other.
    assert round(fold([*samples, *samples]).gpu_means["utilization_percentage"]) == 79


def test_times_of_a_last_attempt_are_not_compared() -> None:
    whole = [started(), ended(metrics={"train_seconds": 500.0})]
    resumed = [started(), ended("STOPPED"), started(2), ended(metrics={"train_seconds": 50.0})]
    (row,) = [row for row in sections([side(*whole), side(*resumed)])["Speed"] if "tr" in row.key]
    assert row.values == ("500", "")


def test_uncommitted_changes_are_compared_by_file() -> None:
    untracked = "# untracked: y.py\n"
    assert list(comparison.patches(PATCH.format(1), untracked + PATCH.format(2))) == [
        "x.py",
        "-+new 1",
        "++new 2",
        "untracked: y.py (second only)",
    ]
    assert list(comparison.patches(PATCH.format(1), PATCH.format(1))) == []
    removed = PATCH.format("1\n--- a comment in SQL")
    assert list(comparison.patches(PATCH.format(1), removed)) == ["x.py", "+--- a comment in SQL"]
    assert list(comparison.patches("", PATCH.format(1))) == [
        "x.py (second only)",
        "+-old",
        "++new 1",
    ]


def commands(*events: object) -> list[str]:
    return reproduce.commands("mine", fold(events))  # type: ignore[arg-type]


def test_the_commands_that_repeat_a_run() -> None:
    train = "/usr/bin/rankzero train x.py --run-name mine lr=1 'name=a b'"
    assert commands(begun(train)) == ["rankzero train x.py lr=1 'name=a b'"]
    assert commands(begun(train.replace("--run-name", "--name"))) == commands(begun(train))
    assert commands(begun(train, mlflow__source__git__commit="abc", rankzero__dirty="true"))[
        :2
    ] == ["git checkout abc", "git apply diff.patch   # of the run's artifacts, in provenance/"]
    # A scheduler's command names the run, and this option needs the name.
    assert commands(begun(train.replace("lr=1", "--resume-if-there lr=1"))) == commands(
        begun(train)
    )
    for changes in ("false", "untracked", "incomplete"):
        environment = {"mlflow__source__git__commit": "abc", "rankzero__dirty": changes}
        assert "git apply" not in "".join(commands(begun(train, **environment)))
    again = begun("/x/rankzero/__main__.py resume mine train.epochs=8", 2)
    assert commands(begun(train), ended(), again) == [
        "rankzero train x.py lr=1 'name=a b' --name mine-again",
        "rankzero resume mine-again train.epochs=8",
    ]
    failed = dataclasses.replace(again, total_steps=None)  # type: ignore[type-var]
    assert commands(begun(train), ended("KILLED"), failed, ended("FAILED")) == commands(
        begun(train)
    ), "a resume that ended in set-up"
    changed = dataclasses.replace(again, step=52)  # type: ignore[type-var]
    assert commands(begun(train), ended("KILLED"), changed) == [
        "rankzero train x.py lr=1 'name=a b' --name mine-again",
        "# this attempt continued from step 52; the command above trains past it",
        "rankzero resume mine-again train.epochs=8",
    ]
    assert commands(begun(train), ended(), changed) == commands(begun(train), ended(), again)
    exact = begun("/usr/bin/rankzero resume mine --nproc=2", 3)
    assert commands(begun(train), exact) == commands(begun(train))
    limited = dataclasses.replace(begun(train), params={"train.limits.max_minutes": "5"})  # type: ignore[type-var]
    later = dataclasses.replace(exact, params=limited.params)  # type: ignore[type-var,attr-defined]
    assert (
        commands(limited, ended("KILLED"), later, ended(), later, ended(), later)[1:]
        == ["rankzero resume mine-again --nproc=2"] * 2
    )
    # A job that is submitted again runs the same command, with --resume-if-there.
    submitted = dataclasses.replace(begun(train, 2), params=limited.params)  # type: ignore[type-var,attr-defined]
    assert commands(limited, ended(), submitted)[1:] == ["rankzero resume mine-again"]
    assert commands(begun("train.py --lr 3")) == ["python train.py --lr 3"]
    assert commands(begun("/x/ipykernel_launcher.py -f /y/kernel-1.json")) == []
    assert commands(begun("python -m ipykernel_launcher -f /y/kernel-1.json")) == []
    assert commands(started()) == []


def test_the_commands_that_repeat_a_run_of_a_search_or_a_repeat() -> None:
    trial = begun("rankzero search x.py --trials 3", rankzero__experiment_file="x.py")
    assert commands(trial) == ["rankzero train x.py --from mine --nproc 1"]
    repeats = [begun(f"rankzero repeat {what}", n) for n, what in enumerate(("x.py", "r"), 1)]
    assert commands(*repeats) == ["rankzero train EXP --from mine --nproc 1"]
    # The own run of a probe, a comparison or a repeat.
    probe = begun("rankzero probe x.py", rankzero__study="mine")
    assert commands(probe) == ["rankzero probe x.py"]
    study = started(**{"search.sampler": "tpe"})
    study = dataclasses.replace(study, environment={"rankzero.command": "rankzero search x.py"})
    assert commands(study) == ["rankzero search x.py"]
