"""Print the readings of MLflow's own system monitors as JSON.

    python mlflow_monitors.py GPU CPU Disk Network

Empty packages lead to MLflow's modules, because importing all of mlflow takes seconds.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import types
from pathlib import Path

spec = importlib.util.find_spec("mlflow")
assert spec is not None and spec.submodule_search_locations
for name in ("mlflow", "mlflow.system_metrics", "mlflow.system_metrics.metrics"):
    package = types.ModuleType(name)
    package.__path__ = [str(Path(spec.submodule_search_locations[0], *name.split(".")[1:]))]
    sys.modules[name] = package

metrics: dict[str, float] = {}
for kind in sys.argv[1:]:
    module = importlib.import_module(f"mlflow.system_metrics.metrics.{kind.lower()}_monitor")
    monitor = getattr(module, f"{kind}Monitor")()
    monitor.collect_metrics()
    metrics |= monitor.aggregate_metrics()
print(json.dumps(metrics))
