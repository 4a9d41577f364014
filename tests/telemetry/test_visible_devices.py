"""Which GPUs are the job's: CUDA_VISIBLE_DEVICES as CUDA reads it, and UUIDs as torch says them."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch.cuda
from hypothesis import given
from hypothesis import strategies as st

from rankzero.telemetry.visible_devices import Device, parse_visible, select_devices

UUIDS = [
    "GPU-27b94a00-ed54-5c24-b1fd-1054085de32a",
    # It begins like the first: shortened, it is ambiguous.
    "GPU-27b94a00-9bdd-d28c-78be-e05a47c7049e",
    "GPU-7fdaf0a5-179b-f636-d15d-daf243e3ff16",
    "GPU-513536b6-7d19-9063-b049-1e69664bb298",
]
WHOLE = [Device(uuid, "NVIDIA H200", index, uuid) for index, uuid in enumerate(UUIDS)]
MIG = [
    Device(
        f"MIG-{digit}eb88891-0321-5fef-9c87-d4af3b54259e",
        "NVIDIA H200 MIG 1g.18gb",
        1,
        UUIDS[1],
        (gpu, compute),
    )
    for digit, gpu, compute in (("f", 9, 0), ("a", 2, 0), ("b", 2, 1))
]
PARTITIONED = [*WHOLE[:2], *MIG, *WHOLE[2:]]

entries = st.sampled_from(
    [
        "0",
        "1",
        "2",
        "3",
        "4",
        "17",
        "-1",
        "+2",
        "-0",
        " 1",
        "1 ",
        "1gpu",
        "0x1",
        "",
        " ",
        "x",
        "none",
        "NoDevFiles",
        "MIG-f",
    ]
    + [uuid[:length] for uuid in UUIDS for length in (4, 8, 12, 20, 40)]
    + [MIG[0].uuid, "GPU-f", " GPU-27b94a00"]
)
values = st.lists(entries, min_size=1, max_size=5).map(",".join)


def visible(value: str, listed: list[Device] = WHOLE) -> list[Device]:
    chosen = select_devices(listed, {"CUDA_VISIBLE_DEVICES": value}, None)
    assert list(chosen) == list(range(len(chosen)))
    return list(chosen.values())


def what_torch_reads(value: str) -> list[int] | list[str]:
    with mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": value}):
        return torch.cuda._parse_visible_devices()


@given(values)
def test_parses_as_torch_does(value: str) -> None:
    assert parse_visible(value) == what_torch_reads(value)


@given(values.filter(lambda value: value.startswith("GPU-")))
def test_finds_the_cards_that_torch_finds(value: str) -> None:
    wanted = [str(entry) for entry in what_torch_reads(value)]
    ordinals = torch.cuda._transform_uuid_to_ordinals(wanted, UUIDS)
    assert visible(value) == [WHOLE[ordinal] for ordinal in ordinals]


@given(values | st.text())
def test_any_value_chooses_listed_devices_once_each(value: str) -> None:
    for listed in (WHOLE, PARTITIONED):
        chosen = visible(value, listed)
        assert len(set(chosen)) == len(chosen) and set(chosen) <= set(listed)


@given(st.permutations(range(4)), st.integers(0, 4))
def test_indices_choose_in_their_order(order: list[int], count: int) -> None:
    chosen = order[:count]
    assert visible(",".join(map(str, chosen))) == [WHOLE[index] for index in chosen]


@pytest.mark.parametrize(
    ("value", "indices"),
    [
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),  # Slurm, to a job without GPUs
        ("1", [1]),
        ("2,0", [2, 0]),
        ("0,9,1", [0]),  # an invalid entry hides what follows
        ("0,-1,1", [0]),
        ("0,x,1", [0]),
        ("0,1,0", []),  # a repetition hides everything
        ("1gpu, +2", [1, 2]),
        (UUIDS[2], [2]),
        ("GPU-7,GPU-5", [2, 3]),
        ("GPU-27b94a00", []),  # two cards begin so
        ("GPU-27b94a00-9,GPU-unknown,GPU-7", [1]),
        ("GPU-7fda,GPU-7f", []),  # twice the same card
        ("GPU-7,0", [2]),  # the first entry says which kind it is
        ("0," + UUIDS[1], [0]),
    ],
)
def test_cuda_visible_devices(value: str, indices: list[int]) -> None:
    assert visible(value) == [WHOLE[index] for index in indices]


def test_without_the_variable_every_card() -> None:
    assert list(select_devices(WHOLE, {}, None).values()) == WHOLE


@given(st.permutations(WHOLE + MIG), st.sampled_from(["NVML", "torch", "torch, taken for a GPU"]))
def test_the_uuids_of_the_trainer_win(order: list[Device], spelling: str) -> None:
    bare = [device.uuid[4:] for device in order]
    uuids = {"NVML": [device.uuid for device in order], "torch": bare}.get(
        spelling, ["GPU-" + uuid for uuid in bare]
    )
    assert select_devices(PARTITIONED, {"CUDA_VISIBLE_DEVICES": "1"}, uuids) == dict(
        enumerate(order)
    )


def test_an_unlisted_uuid_keeps_its_ordinal() -> None:
    assert select_devices(WHOLE, {}, ["GPU-unknown", UUIDS[1], ""]) == {1: WHOLE[1]}


def test_no_uuids_are_no_devices() -> None:
    assert select_devices(WHOLE, {}, []) == {}


@pytest.mark.parametrize(
    ("value", "chosen"),
    [
        ("0", [WHOLE[0]]),
        ("1", [MIG[0]]),  # a partitioned card opens as its first compute instance
        ("0,1,2", [MIG[0]]),  # and then alone
        (UUIDS[1], [MIG[0]]),
        ("MIG-a", [MIG[1]]),
        (f"{MIG[1].uuid},{MIG[0].uuid}", [MIG[1], MIG[0]]),  # for a launcher to deal out
        (f"MIG-{UUIDS[1]}/2/1", [MIG[2]]),  # the spelling of drivers before R470
        (f"MIG-{UUIDS[1]}/9/0,MIG-a", [MIG[0], MIG[1]]),
        (f"MIG-{UUIDS[1]}/7/0", []),
        (f"MIG-{UUIDS[0]}/2/1", []),
        ("MIG-", []),
    ],
)
def test_partitioned_cards(value: str, chosen: list[Device]) -> None:
    assert visible(value, PARTITIONED) == chosen


def test_a_description_names_the_card() -> None:
    assert str(WHOLE[3]) == f"NVIDIA H200, {UUIDS[3]}, index 3"
