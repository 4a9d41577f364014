"""All scenarios. Each injects faults at random moments, and then checks the promises to users."""

from __future__ import annotations

from torture.scenarios import (
    checkpoints,
    crowds,
    disk,
    processes,
    ranks,
    search,
    server,
    signals,
    telemetry,
)
from torture.scenarios.training import Scenario

SCENARIOS: dict[str, Scenario] = {
    "killed ranks": processes.killed_ranks,
    "killed launcher": processes.killed_launcher,
    "courier during uploads": processes.courier_killed_during_uploads,
    "signals": signals.signals,
    "signals twice": signals.signals_twice,
    "early signals": signals.early_signals,
    "late signals": signals.late_signals,
    "stopped ranks": processes.stopped_ranks,
    "stopped for ever": processes.stopped_for_ever,
    "bad server": server.bad_server,
    "killed server": server.killed_server,
    "server away": server.server_away,
    "full server disk": server.full_server_disk,
    "full store disk": server.full_store_disk,
    "locked database": server.locked_database,
    "full disk": disk.full_disk,
    "failing disk": disk.failing_disk,
    "torn journal": disk.torn_journal,
    "damaged checkpoints": checkpoints.damaged_checkpoints,
    "checkpoint disk": checkpoints.checkpoint_disk,
    "hurt ranks": ranks.failing_ranks,
    "jumping clock": ranks.jumping_clock,
    "crowd": crowds.crowd,
    "killed search": search.killed_search,
    "shared study": search.shared_study,
    "GPU telemetry": telemetry.gpu_telemetry,
}
