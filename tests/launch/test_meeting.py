"""How machines meet: the first is the one that has the run, and no job joins another's."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousInfo,
)

from rankzero.launch import agent, torch_compat
from rankzero.launch.machines import Machines
from rankzero.launch.meeting import Meeting, Part, order
from rankzero.run_store.folder import RunFolder
from support.checkpoints import save_steps
from support.commands import free_port, wait_until
from support.runs import append, make_folder, started

# As texts, the second is less than the first.
FIRST, SECOND = "127.0.0.2", "127.0.0.10"
MINE, OTHER = "1f mine", "2f other"


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([Part(), Part(number=0), Part(number=1)], [1, 2, 0]),
        ([Part(number=0), Part(MINE, step=0)], [1, 0]),
        ([Part(MINE, step=5, number=0), Part(MINE, step=20)], [1, 0]),
        # One of the run that they trained before, although another has a longer one.
        ([Part(OTHER, step=90), Part(MINE, step=20, trained=MINE, was_first=True)], [1, 0]),
        # On a shared disk, both have it.
        ([Part(MINE, 20, number=0), Part(MINE, 20, MINE, was_first=True)], [1, 0]),
        # It failed before it wrote anything.
        ([Part(OTHER, trained=MINE), Part(MINE, trained=MINE, was_first=True)], [1, 0]),
        ([Part(MINE, 20, trained=MINE)], [0]),
    ],
)
def test_the_machine_that_has_the_run_is_the_first(
    parts: Sequence[Part], expected: list[int]
) -> None:
    assert order(parts) == expected


@pytest.mark.parametrize("part", [Part(OTHER, trained=MINE), Part(MINE, trained=MINE)])
def test_machines_without_the_run_that_they_trained_begin_no_other(part: Part) -> None:
    with pytest.raises(RendezvousError, match="has the run mine is gone"):
        order([part, Part(OTHER, step=7)])


def meeting_of(machines: Machines, folder: RunFolder | None = None) -> Meeting:
    torch_compat.configure_environment()
    made: Meeting = agent._handler(agent.Topology(1, machines=machines), folder, print)
    return made


def two_machines(most: int = 2) -> list[Machines]:
    """The first serves the rendezvous. The second is the first one by torchrun's order."""
    endpoint = f"127.0.0.1:{free_port()}"
    first = Machines(2, most, endpoint.replace("127.0.0.1", "localhost"), "job", FIRST, number=0)
    return [first, Machines(2, most, endpoint, "job", SECOND, {"is_host": "false"})]


def meet(meetings: Sequence[Meeting]) -> list[RendezvousInfo]:
    with ThreadPoolExecutor() as threads:
        return list(threads.map(Meeting.next_rendezvous, meetings))


def test_rank_0_and_its_address_follow_the_run(tmp_path: Path) -> None:
    folders = [make_folder(tmp_path / name) for name in ("first", "second")]
    meetings = [meeting_of(*pair) for pair in zip(two_machines(), folders, strict=True)]

    def ranks_and_address() -> tuple[int, int, str]:
        one, other = meet(meetings)
        assert one.bootstrap_store_info == other.bootstrap_store_info
        assert one.bootstrap_store_info is not None
        return one.rank, other.rank, one.bootstrap_store_info.master_addr

    # None has the run, so the one that serves the rendezvous begins it, with its own.
    assert ranks_and_address() == (0, 1, FIRST)
    save_steps(folders[0].path, {20: 0.5})
    assert ranks_and_address() == (0, 1, FIRST)
    for one in meetings:
        one.shutdown()
    # A later start, at another place: the second one's run is older than its journal.
    append(folders[1], started())
    save_steps(folders[1].path, {30: 0.5})
    meetings = [meeting_of(*pair) for pair in zip(two_machines(), folders, strict=True)]
    assert ranks_and_address() == (1, 0, SECOND)
    for one in meetings:
        one.shutdown()


def test_another_job_at_the_same_port_ends_with_what_to_change() -> None:
    first, _ = two_machines()
    meeting, another = meeting_of(first), dataclasses.replace(first, job="another")
    with pytest.raises(RendezvousError, match=f"'job' trains at {first.endpoint}: give this"):
        meeting_of(another)
    meeting.shutdown()
    assert meeting_of(another).shutdown()


def test_a_machine_too_many_says_that_it_waits() -> None:
    first, second = two_machines()
    meetings, said = [meeting_of(first), meeting_of(second)], list[str]()
    meet(meetings)
    third = agent._handler(agent.Topology(1, machines=second), None, said.append)
    with ThreadPoolExecutor() as threads:
        waits = threads.submit(third.next_rendezvous)
        wait_until(lambda: said)
        assert not third.shutdown() and not any(one.is_closed() for one in meetings)
        meetings[0].shutdown()
        with pytest.raises(RendezvousGracefulExitError):
            waits.result(timeout=30)
    assert said == [
        "2 machines train job already: this one waits, in case one of them is lost. Another "
        "training needs its own --rdzv-id and port"
    ]
    meetings[1].shutdown()
    result = agent._result_of(None, second)
    assert result.status == "FAILED" and "did not need this one" in result.reason
