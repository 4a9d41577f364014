"""`rankzero search`, `probe`, `report` and `train --from`, for real: two ranks, signals, MLflow."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shlex
import signal
import sqlite3
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from rankzero.catalog.lookup import last_end, mlflow_id
from rankzero.cli.commands import search
from rankzero.cli.main import main
from rankzero.events import RunEnded, StepsLogged
from rankzero.launch import agent
from rankzero.run_store.folder import RunFolder
from rankzero.tuning.options import SearchOptions, default_storage
from rankzero.tuning.session import EARLIER
from rankzero.tuning.space import DEVICES
from rankzero.tuning.study import find_study
from rankzero.tuning.trials.resources import Share
from support.commands import TINY, Command, events, free_port, processes_of, wait_until
from support.stores import list_runs, mlflow_runs

MOODY, SLOW = TINY.with_name("moody.py"), TINY.with_name("slow_samples.py")


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_a_search_from_the_probe_map_to_training_with_the_sweet_spot(rankzero: Command) -> None:
    output = rankzero.succeed(
        *("search", TINY, "train.epochs=8", "goal.target=0.8", "api_key=planted-secret"),
        *("--nproc", 2, "--trials", 4, "--study", "s", "--seeds", 2, "--challengers", 1),
    )
    assert (
        "probe  batch" in output and "Your configuration" in output
    ) or "Nothing beats your own" in output
    runs = mlflow_runs(rankzero.folder)
    parent = runs.pop("s")
    assert parent.status == "FINISHED" and "--from s" in parent.tags["mlflow.note.content"]
    assert "| confirmed trial" in parent.tags["mlflow.note.content"]
    assert parent.metrics["whole_run/best"] >= 0.8
    assert all(run.tags["mlflow.parentRunId"] == parent.run_id for run in runs.values())
    assert {run.status for run in runs.values()} <= {"FINISHED", "KILLED"} and len(runs) >= 4
    study = find_study(default_storage(rankzero.folder / "mlruns"), "s")
    states = {trial.facts["run"]: trial.state for trial in study.trials()}
    assert {runs[name].status for name, state in states.items() if state == "COMPLETE"} == {
        "FINISHED"
    }
    assert {runs[name].status for name, state in states.items() if state == "PRUNED"} <= {"KILLED"}
    found = yaml.safe_load(
        (rankzero.folder / "mlruns/runs/s/artifacts/sweet_spot.yaml").read_text()
    )
    # Other machines may share the database.
    assert b"planted-secret" not in (rankzero.folder / "mlruns/studies.db").read_bytes()
    assert rankzero("report", "s")[1].strip().endswith("runs." if "pays" in output else ".")
    rankzero.succeed(
        *("train", TINY, "--from", "s", "api_key=mine", "train.steps=5", "--run-name", "with")
    )
    params = mlflow_runs(rankzero.folder)["with"].params
    assert params["train.batch_size"] == str(found["train"]["batch_size"]) and params["lr"] == str(
        found["lr"]
    )
    again = ("search", TINY, "--nproc", 2, "--trials", 2, "--seeds", 2, "--study", "s2")
    code, output = rankzero(*again, "--like", "s", "train.epochs=8", "goal.target=0.8")
    assert code == 0 and "like   s: " in output, output
    second = find_study(default_storage(rankzero.folder / "mlruns"), "s2")
    assert [one.parameters for one in second.trials()[1:2]] == second.facts[EARLIER][:1]
    code, output = rankzero(*again, "--like", "s", "train.epochs=8", "goal.target=0.8")
    assert code == 0 and "--like changes nothing" in output, output
    wait_until(lambda: not processes_of(rankzero.folder))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_probe_decides_loading_processes_and_outlives_what_fails(
    rankzero: Command, tmp_path: Path
) -> None:
    rankzero.environ |= {"CXX": "/no/compiler", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    words = (SLOW, "--nproc", 2, "--offline", "--knobs", "workers,compile,channels_last")
    output = rankzero.succeed("probe", *words)
    store = rankzero.folder / "mlruns"
    (table,) = store.glob("runs/*/artifacts/knobs.json")
    found = json.loads(table.read_text())
    rows = [dict(zip(found["columns"], row, strict=True)) for row in found["data"]]
    (kept,) = (row for row in rows if row["decision"] == "kept")
    assert kept["knob"] == "workers" and kept["low"] > 1, output
    others = {row["knob"]: row["decision"] for row in rows if row["knob"] != "workers"}
    assert others == {"compile": "failed", "channels_last": "refused"}, output
    (probes,) = store.glob("probes/*.jsonl")
    before = probes.read_bytes()
    output = rankzero.succeed("search", *words, "--trials", 2, "--seeds", 2, "goal.target=0.8")
    more = probes.read_bytes().removeprefix(before)
    begun, failed = map(json.loads, more.splitlines())
    assert begun["begun"]["settings"] == failed["settings"] == {"train.compile": True}
    assert failed["status"] == "failed", "what is mended by now is measured again"
    assert "workers" in output.splitlines()[-4] and "The sweet spot" in output, output
    (sweet_spot,) = store.glob("runs/*/artifacts/sweet_spot.yaml")
    assert yaml.safe_load(sweet_spot.read_text())["train"]["workers"] in (1, 2)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_way_a_trial_can_end(rankzero: Command) -> None:
    output = rankzero.succeed(
        *("search", MOODY, "--nproc", 2, "--trials", 6, "--sampler", "grid"),
        *("--pruner", "none", "--no-probe", "--silence-seconds", 8, "--study", "s"),
    )
    study = find_study(default_storage(rankzero.folder / "mlruns"), "s")
    runs = mlflow_runs(rankzero.folder)
    ends = {
        str(trial.parameters["mood"]): (trial.state, runs[trial.facts["run"]].status)
        for trial in study.trials()
    }
    assert ends == {
        "good": ("COMPLETE", "FINISHED"),
        "crash": ("FAIL", "FAILED"),
        "hang": ("FAIL", "FAILED"),
        "killed": ("FAIL", "FAILED"),
        "nan": ("PRUNED", "FAILED"),
        "memory": ("PRUNED", "FAILED"),
    }
    reasons = {
        str(trial.parameters["mood"]): str(trial.facts["reason"]) for trial in study.trials()
    }
    assert "broken on purpose" in reasons["crash"] and "out of memory" in reasons["memory"]
    assert "no sign of life for 8 s" in reasons["hang"] and "not finite" in reasons["nan"]
    reasons_in_mlflow = {
        trial.parameters["mood"]: runs[trial.facts["run"]].tags["rankzero.reason"]
        for trial in study.trials()
    }
    assert (
        "no sign of life" in reasons_in_mlflow["hang"]
        and "broken on purpose" in reasons_in_mlflow["crash"]
    )
    assert "RUNNING" not in {run.status for run in runs.values()}
    assert "No configuration reached" in output
    wait_until(lambda: not processes_of(rankzero.folder))


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_a_search_of_numbers_of_devices_and_what_they_cost(rankzero: Command) -> None:
    words = ("search", TINY, "train.epochs=6", "goal.target=0.8", "--nproc", "1,2", "--trials", 3)
    words += ("--seeds", 2, "--challengers", 1, "--study", "s", "--knobs", "batch", "--offline")
    output = rankzero.succeed(*words, "--price", 3.6)
    assert "probe  on 2 devices" in output and "at 3.6 per device-hour" in output, output
    assert "--from s --nproc" in output
    study = find_study(default_storage(rankzero.folder / "mlruns"), "s")
    counts = {}
    for trial in study.trials():
        started = next(
            iter(events(RunFolder(rankzero.folder / "mlruns/runs" / trial.facts["run"])))
        )
        counts[trial.parameters[DEVICES]] = started.params["world_size"]
    assert counts == {1: "1", 2: "2"}
    files = {path.name for path in (rankzero.folder / "mlruns/runs/s/artifacts").iterdir()}
    assert {"cost.json", "cost.png"} <= files
    # The machine may be too busy for a curve.
    assert ("scaling.json" in files) == ("By the probe, batch" in output)
    code, output = rankzero(*words, "--price", 7.2)
    assert code == 0 and "at 7.2 per device-hour" in output, output
    assert "\ntrial" not in output and "\nconfirm" not in output, "nothing is trained again"


@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_keeps_the_study_and_the_same_command_resumes_it(
    rankzero: Command, number: signal.Signals
) -> None:
    words = (
        *("search", TINY, "train.epochs=15", "step_seconds=0.01", "goal.target=0.999"),
        *("--nproc", 2, "--trials", 3, "--no-probe", "--study", "s", "--seeds", 2),
        *("--challengers", 1),
    )
    process = rankzero.start(*words)
    trial = rankzero.wait_for_step(20, "s-t01")
    # As a terminal does, and a service manager; the search forwards it.
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    output, _ = process.communicate(timeout=60)
    assert process.wait() == 75 and "search" in output.rpartition("interrupted: `")[2], output
    wait_until(lambda: not processes_of(rankzero.folder))
    ended = last_end(trial)
    assert ended is not None and ended.reason.startswith("stopped by ")
    runs = mlflow_runs(rankzero.folder)
    assert (runs["s"].status, runs["s-t00"].status, runs["s-t01"].status) == (
        "KILLED",
        "FINISHED",
        "KILLED",
    )
    rankzero.succeed(*words)
    runs = mlflow_runs(rankzero.folder)
    assert runs["s"].status == "FINISHED" and runs["s"].tags["rankzero.attempt"] == "2"
    study = find_study(default_storage(rankzero.folder / "mlruns"), "s")
    assert [trial.state for trial in study.trials()].count("FAIL") == 1
    assert study.trials()[1].parameters == study.trials()[2].parameters


@pytest.mark.timeout(300)
def test_sigkill_of_the_search_leaves_no_process_and_no_run_running(rankzero: Command) -> None:
    words = (
        *("search", TINY, "train.epochs=400", "step_seconds=0.01", "goal.target=0.999"),
        *("--nproc", 2, "--trials", 2, "--no-probe", "--study", "s"),
    )
    process = rankzero.start(*words)
    folder = rankzero.wait_for_step(20, "s-t00")
    os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: not processes_of(rankzero.folder))
    ended = last_end(folder)
    assert ended is not None and ended.status == "KILLED"
    assert [event.status for event in events(rankzero.runs[0]) if isinstance(event, RunEnded)] in (
        ["FAILED"],
        ["KILLED"],
    )
    assert "RUNNING" not in {run.status for run in mlflow_runs(rankzero.folder).values()}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_trials_side_by_side_and_a_second_command_that_helps(rankzero: Command) -> None:
    storage = f"sqlite:///{rankzero.folder / 'shared.db'}"
    words = (
        *("search", MOODY.with_name("narrow.py"), "train.epochs=9", "step_seconds=0.05"),
        *("goal.target=0.9999", "--nproc", 1, "--trials", 7, "--pruner", "none", "--no-probe"),
        *("--study", "s", "--storage", storage),
    )
    leads = rankzero.start(*words, "--parallel", 2)
    rankzero.wait_for_step(1, "s-t00")
    code, helped = rankzero(*words)
    assert code == 0, helped
    output, _ = leads.communicate(timeout=200)
    assert leads.returncode == 0, output
    assert (
        "leads this study" in helped and "confirms and decides" in helped and "use:" not in helped
    )
    assert "No configuration reached" in output and "look:" in output
    assert "use:" not in output and not list(rankzero.folder.rglob("sweet_spot.yaml"))
    study = find_study(storage, "s")
    trials = [
        trial for trial in study.trials() if trial.number not in study.abandoned
    ]  # one asked for one too many
    assert len([trial for trial in trials if "same_as" not in trial.facts]) == 7
    assert len({trial.facts["owner"] for trial in trials}) == 2, "one of them did nothing"
    assert (
        at_once([rankzero.folder / "mlruns/runs" / f"s-t{trial.number:02d}" for trial in trials])
        >= 2
    )
    runs = mlflow_runs(rankzero.folder)
    parent = runs.pop("s")
    assert {run.status for run in runs.values()} <= {"FINISHED", "KILLED"}
    assert {run.tags["mlflow.parentRunId"] for run in runs.values()} == {parent.run_id}
    code, output = rankzero("search", TINY, "--nproc", 1, "--parallel", 99, "--no-probe")
    assert code == 2 and "needs as many processor cores" in output
    wait_until(lambda: not processes_of(rankzero.folder))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_helper_without_a_leader_names_the_command_that_decides(rankzero: Command) -> None:
    words = (
        *("search", MOODY.with_name("narrow.py"), "train.epochs=4", "step_seconds=0.05"),
        *("goal.target=0.9999", "--nproc", 1, "--trials", 8, "--pruner", "none", "--no-probe"),
        *("--study", "s", "--seeds", 2, "--challengers", 1),
        *("--storage", f"sqlite:///{rankzero.folder / 'a b.db'}"),
        *("--tracking-uri", f"sqlite:///{rankzero.folder / 'mlruns' / 'mlflow.db'}"),
    )
    # Two stores, as on two machines.
    leads = rankzero.start(*words, "--trials", 99)
    rankzero.wait_for_step(1, "s-t00")
    helps = rankzero.start(*words, "--dir", rankzero.folder / "other")
    wait_until(lambda: list(rankzero.folder.glob("other/runs/s-t*")), 100)
    os.kill(leads.pid, signal.SIGKILL)
    helped, _ = helps.communicate(timeout=100)
    assert helps.returncode == 75 and "has ended without a verdict" in helped, helped
    (again,) = re.findall(r"`[^`]*?rankzero (.*)`", helped.replace("\n", " "))
    code, output = rankzero(*shlex.split(again))
    assert code == 0 and "look:" in output, output
    store = f"sqlite:///{rankzero.folder / 'mlruns' / 'mlflow.db'}"
    runs = [run for run in list_runs(store) if run.name == "s"]
    assert [run.status for run in runs] == ["FINISHED"]


def test_trials_side_by_side_divide_a_containers_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list[Share | None]()

    def make_host(_arguments: object, share: Share | None = None) -> SimpleNamespace:
        found.append(share)
        return SimpleNamespace(close=lambda: None)

    described = SimpleNamespace(gpus=0), SimpleNamespace(devices=(1,))
    monkeypatch.setattr(search, "_search_options", lambda _: SearchOptions())
    monkeypatch.setattr(search, "_make_host", make_host)
    monkeypatch.setattr(search, "described_space", lambda *_: described)
    monkeypatch.setattr(search, "_search", lambda *_: 0)
    monkeypatch.setattr(search, "usable_cores", lambda: list(range(16)))
    monkeypatch.setattr(search, "core_count", lambda: 4)
    assert search.run(argparse.Namespace(parallel=2, slurm=False, ray=None, new=False)) == 0
    cores = [one.cores or () for one in found if one]
    assert [len(one) for one in cores] == [2, 2] and not set(cores[0]) & set(cores[1])
    # Two containers of one machine see the same cores.
    assert len({tuple(search.own_cores(f"pod-{number}")) for number in range(4)}) == 4
    assert all(len(set(search.own_cores(f"pod-{number}"))) == 4 for number in range(4))
    monkeypatch.setattr(search, "core_count", lambda: 16)
    assert search.own_cores("pod-1") == list(range(16))


def test_sigterm_stops_a_search_as_ctrl_c_does_and_once() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with search.stoppable(argparse.Namespace()):
        with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGHUP)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_stop_before_the_study_has_begun_names_the_command_as_well(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(search, "_search_options", lambda _: SearchOptions())
    monkeypatch.setattr(search, "_make_host", lambda _: signal.raise_signal(signal.SIGTERM))
    monkeypatch.setattr("sys.argv", ["rankzero", "search", "x.py", "--new"])
    # A new study has no journal before its run has begun.
    RunFolder(tmp_path).events.touch()
    for opened, again in ((None, " --new"), (tmp_path / "s-2", " --new"), (tmp_path, "")):
        folder = opened and RunFolder(opened)
        assert search.run(argparse.Namespace(new=True, opened=folder, offline=True)) == 75
        assert f"search x.py{again}` continues the study" in capsys.readouterr().err


def at_once(folders: list[Path]) -> int:
    """Return how many of these runs trained at the same time, at most."""
    spans = []
    for folder in folders:
        times = [
            event.times[0] for event in events(RunFolder(folder)) if isinstance(event, StepsLogged)
        ]
        spans += [(times[0], 1), (times[-1], -1)] if times else []
    return max(itertools.accumulate(change for _, change in sorted(spans)))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("widht=3",), "did you mean 'width'"),
        (("--seeds", "1"), "--seeds must be at least 2"),
        (("--minutes", "-1"), "--minutes must be above 0"),
        (("--objective", "quality"), "needs --trial-minutes"),
        (("goal.metric=val/f1",), "the goal is 'val/f1', but an evaluation has"),
        (("fail=data",), "no such data"),
        (("--nproc", "0"), "--nproc must be at least 1"),
        (("--nproc", "1,1"), "--nproc 1,1 names a number twice"),
        (("--nproc", "2,x"), "--nproc takes whole numbers, such as 1,2,4: got '2,x'"),
        (("--nproc", "1,64"), "--nproc 64: each trial has"),
        (("--nproc", "1,2", "train.strategy=single"), "train.strategy=single is one process"),
        (("--nproc", "1,2", "--objective", "throughput"), "--nproc 1,2 is about the time to a"),
        (("--tolerance", "nan"), "--tolerance must be at least 0, got nan"),
        (("--price", "-1"), "--price must be above 0, got -1"),
        (("--price", "nan"), "--price must be above 0"),
        (("--price", "2", "--objective", "tokens"), "--price is about the time to a target"),
        (("--objective", "energy", "--nnodes", "2"), "counts one machine's energy"),
        (("--like", "nothing"), "no study is called 'nothing'"),
        (("--like", "s", "--sampler", "grid"), "--like begins with other trials, and a grid"),
        (("--knobs", "batch,colour"), "no knob is called 'colour'"),
        (("--knobs", "batch,compile"), "needs the probe, which --no-probe leaves out"),
    ],
)
def test_each_mistake_gets_one_message(
    words: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In this process: the server that reads the experiment's file starts once for all."""
    agent.warm_up()
    monkeypatch.chdir(tmp_path)
    code = main(["search", str(TINY), "--nproc", "1", "--no-probe", *words])
    captured = capsys.readouterr()
    assert code in (1, 2) and message in captured.err, captured
    assert "Traceback" not in captured.err + captured.out


def test_a_foreign_file_as_storage_stays_as_it_is(rankzero: Command, tmp_path: Path) -> None:
    assert rankzero("report", "nothing")[0] == 2
    foreign = tmp_path / "foreign.db"
    foreign.write_bytes(b"somebody's file, no database")
    code, output = rankzero(
        "search", TINY, "--nproc", 1, "--no-probe", "--storage", f"sqlite:///{foreign}"
    )
    assert code == 2 and "cannot be used" in output and foreign.read_bytes().startswith(b"somebody")


@pytest.mark.slow
def test_the_probe_imports_no_torch_and_keeps_its_results(rankzero: Command) -> None:
    output = rankzero.succeed("probe", TINY, "train.batch_size=8", "--nproc", 1)
    first = output.count("samples/s ±")
    assert first >= 2
    code, output = rankzero("probe", TINY, "train.batch_size=8", "--nproc", 1, "--new", "--offline")
    assert code == 0 and output.count("samples/s ±") == 0, "measured again"
    (offline,) = (run for run in rankzero.runs if run.path.name.endswith("-2"))
    assert mlflow_id(offline) is None, "it was delivered offline"
    rankzero.succeed("sync", offline.path.name)
    with sqlite3.connect(rankzero.folder / "mlruns" / "mlflow.db") as database:
        query = "select count(*) from runs where status = 'FINISHED'"
        assert database.execute(query).fetchone() == (2,)
    away = ("--tracking-uri", f"http://127.0.0.1:{free_port()}", "--new", "--wait-delivery=2")
    code, output = rankzero("probe", TINY, "train.batch_size=8", "--nproc", 1, *away)
    assert code == 74 and "note: not everything is in MLflow yet" in output, output
