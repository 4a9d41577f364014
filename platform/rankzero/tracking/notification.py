"""Notifies people of a run's end, with one POST to a webhook.

The recorder sends it. So it is sent if the command was killed, and no training waits for it.
"""

from __future__ import annotations

import contextlib
import html
import json
import math
import os
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any

from rankzero.events import RunEnded
from rankzero.launch import failures
from rankzero.launch.failures import FailureKind
from rankzero.redaction.text import NOTIFY, line_without_secrets
from rankzero.reporting.run_facts import Facts, fold
from rankzero.reporting.run_report import duration
from rankzero.run_store import run_locks
from rankzero.run_store.folder import RunFolder, write_atomically
from rankzero.run_store.journal import read_all
from rankzero.scalars import shown
from rankzero.tracking.delivery_status import recorder_lives
from rankzero.tracking.retry import guarded, log

LONGEST_SECONDS = 15.0
"""Two tries, and a name server that does not answer."""
_RESULT = "notified.json"
_EVENTS = {
    "FINISHED": "finished",
    "KILLED": "stopped",
    FailureKind.HANG: "hung",
    FailureKind.NOT_FINITE: "diverged",
}
_SHAPES = ("slack", "ntfy")


def start(folder: RunFolder, token: str, url: str) -> threading.Thread:
    """Send the news of the attempt `token` from a thread, and write how that went."""

    def send() -> None:
        error = post(url, news_of(folder))
        if error is not None:
            log.warning(error)
        write_atomically(folder.path / _RESULT, json.dumps({"token": token, "error": error}))

    thread = threading.Thread(target=guarded, args=(send,), name="notify", daemon=True)
    thread.start()
    return thread


def problem(folder: RunFolder, hurried: Callable[[], bool] = lambda: False) -> str | None:
    """Return why the newest attempt's news may not have been sent; None if they were.

    Waits for the recorder, but not longer than `LONGEST_SECONDS` or until `hurried()`.
    """
    claim, until = run_locks.latest(folder, 0), time.monotonic() + LONGEST_SECONDS
    # On another machine, that machine's command waits.
    if not os.environ.get(NOTIFY) or claim is None or not run_locks.is_local(claim):
        return None
    while True:
        lives = recorder_lives(folder)
        with contextlib.suppress(OSError, ValueError):
            result = json.loads((folder.path / _RESULT).read_text(encoding="utf-8"))
            if result["token"] == claim.token:
                return None if result["error"] is None else str(result["error"])
        if not lives or hurried() or time.monotonic() > until:
            return f"nobody knows whether the notification was sent; see {folder.path}/recorder.log"
        time.sleep(0.05)


def news_of(folder: RunFolder, failure: str = "") -> dict[str, Any]:
    """Return how the run's newest attempt ended, without secrets: for people, and for programs.

    `failure`: why it did not even start.
    """
    facts, identity = fold(read_all(folder.events)), folder.identity
    end = facts.end
    if end is None or failure:
        end = RunEnded(time.time(), "FAILED", failure or "its end is not recorded", None, {})
    event, goal = _event(folder, facts, end), facts.goal.metric
    best = facts.result if facts.result is not None and math.isfinite(facts.result) else None
    # The reason of a run that has finished may say the best value.
    said = "" if best is None or goal in end.reason else f"best {goal} {shown(best)}"
    spent = "" if facts.started is None else duration(facts.duration)
    host = facts.environment.get("rankzero.host", "")
    news = {
        "title": f"{identity.name} {event}",
        "message": f"{end.reason}\n{', '.join(filter(None, (said, spent, host)))}".strip(),
        "run": identity.name,
        "experiment": identity.experiment,
        "event": event,
        "status": end.status,
        "reason": end.reason,
        "goal": goal,
        "best": best,
        "seconds": round(facts.duration, 1),
        "host": host,
    }
    texts = {key: line_without_secrets(one) for key, one in news.items() if isinstance(one, str)}
    return {**news, **texts}


def is_webhook(url: str) -> bool:
    """Return whether it is an http(s) address, with or without a shape in front."""
    with contextlib.suppress(ValueError):
        parts = urllib.parse.urlsplit(_split(url)[1])
        return parts.scheme in ("http", "https") and bool(parts.hostname)
    return False


def post(
    url: str, news: Mapping[str, Any], *, answer_seconds: float = 4.0, pause_seconds: float = 1.0
) -> str | None:
    """Send the news, a second time if the first fails. Return why both failed, without the URL."""
    import requests

    address, body = _shaped(url, news)
    why = ""
    for pause in (pause_seconds, 0.0):
        try:
            # No redirects: a POST that becomes a GET would be lost without an error.
            with requests.post(
                address, json=body, timeout=answer_seconds, allow_redirects=False, stream=True
            ) as answer:
                if 200 <= answer.status_code < 300:
                    return None
                why = f"HTTP {answer.status_code} {line_without_secrets(answer.reason or '', 80)}"
        except Exception as error:  # a proxy, a name, a certificate: whatever it is, people read it
            why = _innermost(error)
        time.sleep(pause)
    host = urllib.parse.urlsplit(address).hostname
    return f"the notification to {host} failed twice: {why.strip()}"


def _split(url: str) -> tuple[str, str]:
    """Return the shape that is in front of an address, and the address."""
    shape, _, address = url.partition("+")
    return (shape, address) if shape in _SHAPES else ("", url)


def _shaped(url: str, news: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return where to send the news, and the JSON that is understood there."""
    shape, address = _split(url)
    parts = urllib.parse.urlsplit(address)
    host, text = parts.hostname or "", f"{news['title']}\n{news['message']}"
    if shape == "slack" or host == "hooks.slack.com":
        return address, {"text": html.escape(text, quote=False)}
    if shape == "ntfy" or host.startswith("ntfy."):
        above, _, topic = parts.path.rstrip("/").rpartition("/")
        body = {"topic": topic, "title": news["title"], "message": news["message"]}
        priority = 3 if news["status"] == "FINISHED" else 4
        return parts._replace(path=above or "/").geturl(), {**body, "priority": priority}
    return address, {"text": text, **news}


def _event(folder: RunFolder, facts: Facts, end: RunEnded) -> str:
    failure = failures.first(folder.failures)
    # Not that of an earlier attempt.
    if end.status == "FAILED" and failure is not None and failure.time >= (facts.started or 0.0):
        return _EVENTS.get(failure.kind, "failed")
    return _EVENTS.get(end.status, "failed")


def _innermost(error: BaseException) -> str:
    """Return an error's first cause. The errors around it quote the URL."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return f"{type(error).__name__} {getattr(error, 'strerror', None) or ''}"
