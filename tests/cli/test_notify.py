"""`--notify` on real commands: who is told what, and that the address stays a secret."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from cli.test_browse import on_a_terminal
from support.commands import TINY, Command, wait_until
from support.webhook import Webhook

SECRET = "planted7staple"
BROKEN = f"""
import sys
sys.path.insert(0, {str(TINY.parent)!r})
from tiny import Tiny

class Broken(Tiny):
    def data(self):
        raise OSError("the disk of the data is gone")
"""


def places_of_the_secret(folder: Path) -> list[Path]:
    with sqlite3.connect(folder / "mlruns" / "mlflow.db") as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    database.close()
    files = (path for path in (folder / "mlruns").rglob("*") if path.is_file())
    return [path for path in files if SECRET.encode() in path.read_bytes()]


def test_a_run_is_news_and_the_address_is_nowhere(rankzero: Command, webhook: Webhook) -> None:
    webhook.answers.extend([200, 500, 500])
    address = f"slack+{webhook.address}/{SECRET}"
    code, output = rankzero("train", TINY, "--notify", address, "train.steps=5", "--name", "first")
    assert code == 0 and "notification" not in output
    [(path, body)] = webhook.got
    assert path == f"/{SECRET}" and body["text"].startswith("first finished\nbest val/accuracy 0.")
    words = ("resume", "first", "train.steps=9", f"--notify={address}", "--offline")
    code, output = rankzero(*words)
    assert code == 0 and "note: the notification to 127.0.0.1 failed twice: HTTP 500" in output
    assert SECRET not in output and places_of_the_secret(rankzero.folder) == []
    _, report = rankzero("report", "first")
    assert "train.steps=9 --offline\n" in report and "notify" not in report


def test_a_killed_command_and_a_failure_are_news(rankzero: Command, webhook: Webhook) -> None:
    rankzero.environ["RANKZERO_NOTIFY"] = f"{webhook.address}/{SECRET}"
    words = ("train", TINY, "train.steps=4000", "step_seconds=0.02", "--offline")
    process = rankzero.start(*words, "--name", "killed")
    rankzero.wait_for_step(3)
    process.kill()
    (rankzero.folder / "broken.py").write_text(BROKEN)
    code, output = rankzero("train", "broken.py", "--offline", "--name", "broken")
    assert code == 1 and "the disk of the data is gone" in output
    wait_until(lambda: len(webhook.got) == 2)
    told = {body["run"]: body for _, body in webhook.got}
    assert told["killed"]["event"] in ("stopped", "failed"), told
    assert told["broken"]["event"] == "failed"
    assert "the disk of the data is gone" in told["broken"]["reason"]
    assert places_of_the_secret(rankzero.folder) == []


def test_a_wrong_address_is_refused_and_not_shown(rankzero: Command) -> None:
    code, output = rankzero("train", TINY, "--notify", f"hooks.example.org/{SECRET}")
    assert code == 2 and "must be like https://ntfy.sh/my-topic" in output
    assert SECRET not in output and not rankzero.runs
    rankzero.environ["RANKZERO_NOTIFY"] = f"ftp://{SECRET}"
    code, output = rankzero("train", TINY)
    assert code == 2 and "RANKZERO_NOTIFY" in output and SECRET not in output


@pytest.mark.slow
def test_a_search_is_news_once(rankzero: Command, webhook: Webhook) -> None:
    words = ("search", TINY, "train.epochs=2", "goal.target=0.1", "--trials", 2, "--no-probe")
    address = f"ntfy+{webhook.address}/{SECRET}"
    output = rankzero.succeed(
        *words, "--seeds", 2, "--nproc", 1, "--challengers", 1, "--notify", address, "--offline"
    )
    [(path, body)] = webhook.got
    assert path == "/" and body["topic"] == SECRET and body["title"].endswith("finished")
    assert body["message"].splitlines()[0] in output
    assert places_of_the_secret(rankzero.folder) == []


def test_a_terminal_has_a_title_and_rings(rankzero: Command) -> None:
    words = ("train", str(TINY), "train.steps=5", "--offline", "--name", "first")
    shown = on_a_terminal(rankzero, *words)
    assert "\x1b]0;first: FINISHED\x07" in shown and "\x07" in shown.partition("FINISHED\x07")[2]
