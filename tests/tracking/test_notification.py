"""Notifications of a run's end, to a real HTTP server, by a real recorder."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rankzero.api.results import Run
from rankzero.catalog.summary import read_summary
from rankzero.launch import failures
from rankzero.launch.failures import Failure, FailureKind
from rankzero.redaction.text import NOTIFY
from rankzero.run_store import run_locks
from rankzero.run_store.folder import RunFolder
from rankzero.tracking import notification, recorder
from rankzero.tracking.notification import is_webhook, news_of, post
from support.commands import wait_until
from support.paths import SUPPORT
from support.runs import T0, append, ended, evaluated, make_folder, started, steps
from support.webhook import Webhook

SECRET = "T0/B0/planted"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = make_folder(tmp_path, "http://127.0.0.1:9", name="brisk-otter-412")
    append(made, started(), steps(1, 4), evaluated(4, 0.6), ended())
    return made


def test_each_service_gets_the_form_that_it_understands(
    folder: RunFolder, webhook: Webhook
) -> None:
    news, here = news_of(folder), webhook.address
    for url in (f"{here}/hook", f"slack+{here}/services/x", f"ntfy+{here}/below/topic?auth=a"):
        assert post(url, news) is None
    (path, plain), (_, slack), (root, ntfy) = webhook.got
    assert path == "/hook" and plain["event"] == "finished" and plain["run"] == "brisk-otter-412"
    assert plain["goal"] == "val/accuracy" and plain["best"] == 0.6 and plain["seconds"] == 100
    text = "brisk-otter-412 finished\ntrained\nbest val/accuracy 0.6, 1 min 40 s"
    assert plain["text"] == text and slack == {"text": text}
    assert root == "/below?auth=a"
    assert ntfy["topic"] == "topic" and f"{ntfy['title']}\n{ntfy['message']}" == text
    assert notification._shaped("https://hooks.slack.com/services/x", news)[1] == slack
    assert notification._shaped("https://ntfy.sh/topic", news) == ("https://ntfy.sh/", ntfy)


def test_a_failure_is_retried_once_and_named_without_the_address(
    folder: RunFolder,
    webhook: Webhook,
) -> None:
    news, url = news_of(folder), f"{webhook.address}/{SECRET}"
    webhook.answers.append(503)
    assert post(url, news, pause_seconds=0.0) is None and len(webhook.got) == 2
    webhook.answers.extend([404, 404, 302, 302])
    assert post(url, news, pause_seconds=0.0) == (
        "the notification to 127.0.0.1 failed twice: HTTP 404 Not Found"
    )
    assert "HTTP 302" in str(post(url, news, pause_seconds=0.0)), "a redirect loses the message"
    assert [path for path, _ in webhook.got] == [f"/{SECRET}"] * 6
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port, began = silent.getsockname()[1], time.monotonic()
        told = post(f"http://127.0.0.1:{port}/{SECRET}", news, answer_seconds=0.2)
        assert str(told).endswith("failed twice: TimeoutError") and time.monotonic() - began < 5
    told = post(f"http://me:{SECRET[-7:]}@127.0.0.1:{port}/{SECRET}", news, pause_seconds=0.0)
    assert told == (
        "the notification to 127.0.0.1 failed twice: ConnectionRefusedError Connection refused"
    )


@pytest.mark.parametrize(
    ("kind", "event"),
    [
        (FailureKind.HANG, "hung"),
        (FailureKind.NOT_FINITE, "diverged"),
        (FailureKind.OUT_OF_MEMORY, "failed"),
    ],
)
def test_a_failure_has_its_kind(tmp_path: Path, kind: FailureKind, event: str) -> None:
    folder = make_folder(tmp_path)
    failures.write(Failure(T0 + 5, 1, "rank 1", "", kind), folder.failures)
    reason = "rank 1 <ended> with password=planted and --api-key planted"
    append(folder, started(), dataclasses.replace(ended("FAILED"), reason=reason))
    news = news_of(folder)
    assert news["event"] == event and "<ended>" in news["message"] and "planted" not in str(news)
    assert "&lt;ended&gt;" in str(notification._shaped("slack+http://here/", news))
    append(folder, started(2, step=50), ended("FAILED"))
    assert news_of(folder)["event"] == "failed", "that failure was of the attempt before"
    append(folder, started(3, step=60), ended("KILLED", "stopped by Ctrl-C"))
    assert news_of(folder)["title"].endswith(" stopped")


def test_values_that_json_lacks_are_left_out(tmp_path: Path, webhook: Webhook) -> None:
    folder = make_folder(tmp_path)
    append(folder, started(), evaluated(4, float("inf")), ended("FAILED"))
    assert post(webhook.address, news_of(folder)) is None and webhook.got[0][1]["best"] is None


def test_a_repeat_has_its_mean_as_runs_has_it(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    append(folder, started(), ended(reason="val/accuracy 0.8", metrics={"best": 0.8}))
    news = news_of(folder)
    assert news["best"] == read_summary(folder).best == Run(folder).best == 0.8
    assert news["message"].count("0.8") == 1


def test_addresses_are_checked() -> None:
    good = ("https://ntfy.sh/t", "ntfy+http://box:8080/t", "slack+https://me:pw@host/x")
    bad = ("ntfy.sh/t", "http://", "ftp://host/x", "discord+https://x/y", "http://[", "")
    assert all(map(is_webhook, good)) and not any(map(is_webhook, bad))


def test_the_recorder_sends_the_end_of_a_killed_rank_0(
    tmp_path: Path,
    webhook: Webhook,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(NOTIFY, f"{webhook.address}/{SECRET}")
    monkeypatch.setenv("RANKZERO_DELIVERY_GRACE_SECONDS", "1")
    webhook.answers.extend([500, 500])
    folder = make_folder(tmp_path, "http://127.0.0.1:9")  # MLflow's server is not there
    words = [sys.executable, SUPPORT / "fake_rank0.py", folder.path, "5", "0.01", "kill"]
    died = subprocess.run(words, stdout=subprocess.DEVNULL, timeout=60, check=False)
    assert died.returncode == -signal.SIGKILL
    told = notification.problem(folder)
    assert str(told).startswith("the notification to 127.0.0.1 failed twice: HTTP 500")
    assert [body["event"] for _, body in webhook.got] == ["failed"] * 2
    assert "died without writing its end" in webhook.got[0][1]["reason"]
    wait_until(lambda: not run_locks.has_live_recorder(folder))
    written = [path.read_bytes() for path in folder.path.rglob("*") if path.is_file()]
    assert not any(b"planted" in text for text in written)


def test_a_child_is_no_news_while_its_parent_lives(
    tmp_path: Path,
    webhook: Webhook,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(NOTIFY, webhook.address)
    parent = make_folder(tmp_path, name="parent")
    child = make_folder(tmp_path, name="child", parent="parent")
    run_locks.claim(parent, 0)
    for folder in (child, parent):
        handle = recorder.start(folder, [], 0, offline=True)
        append(folder, started(), ended())
        handle.close()
        live = functools.partial(run_locks.has_live_recorder, folder)
        wait_until(lambda live=live: live() or webhook.got)
        wait_until(lambda live=live: not live())
    assert [body["run"] for _, body in webhook.got] == ["parent"]
    assert notification.problem(parent) is None
    (parent.path / "notified.json").write_text(json.dumps({"token": "older", "error": None}))
    assert "nobody knows whether" in str(notification.problem(parent, hurried=lambda: True))
    monkeypatch.delenv(NOTIFY)
    assert notification.problem(parent) is None and os.environ.get(NOTIFY) is None
