"""MLflow's server with the environment of `rankzero ui`. Access to it: test_ui_access.py."""

from __future__ import annotations

import json
import threading
import time
import urllib.request

from rankzero.mlflow_store.server import environment
from support.stores import Server

# More than MLflow's server works on at once (40), and four times what its pool holds by default.
COURIERS = 60
SECONDS = 20.0


def _post(address: str, path: str, body: object) -> dict[str, object]:
    request = urllib.request.Request(
        f"{address}/api/2.0/mlflow/{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        found: dict[str, object] = json.loads(answer.read())
        return found


def test_couriers_that_send_at_once_do_not_lock_each_other_out(server: Server) -> None:
    """MLflow's log-batch holds one connection while it waits for a second."""
    run = _post(server.uri, "runs/create", {"experiment_id": "0", "start_time": 1})["run"]
    assert isinstance(run, dict)
    together, answered = threading.Barrier(COURIERS), list[int]()

    def send(number: int) -> None:
        point = {"key": f"metric-{number}", "value": 1.0, "timestamp": 1, "step": 1}
        together.wait()
        _post(server.uri, "runs/log-batch", {"run_id": run["info"]["run_id"], "metrics": [point]})
        answered.append(number)

    threads = [threading.Thread(target=send, args=(number,)) for number in range(COURIERS)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answered) == [*range(COURIERS)] and time.monotonic() - began < SECONDS


def test_other_classes_of_pools_get_no_sizes() -> None:
    """SQLAlchemy would refuse them, and MLflow's server would not start."""
    chosen = {"MLFLOW_SQLALCHEMYSTORE_POOLCLASS": "NullPool"}
    assert not [name for name in environment(chosen) if name.endswith(("SIZE", "OVERFLOW"))]
    assert [name for name in environment({}) if name.endswith(("SIZE", "OVERFLOW"))]
