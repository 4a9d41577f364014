"""Failure files: the kind of a failure, and files of other versions."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from rankzero.config import ConfigError
from rankzero.errors import NotFinite, UserError
from rankzero.launch import failures
from rankzero.launch.failures import Failure, FailureKind


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "out_of_memory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), "out_of_memory"),
        (RuntimeError("CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), "out_of_memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate"), "out_of_memory"),
        (MemoryError(), "out_of_host_memory"),
        (NotFinite("train/loss is not finite at step 3"), "not_finite"),
        (UserError("no such file"), "user_error"),
        (ConfigError("lr: expected float"), "user_error"),
        (ValueError("NotFinite is only a word here"), "other"),
    ],
)
def test_the_kind_of_an_exception(error: Exception, kind: str) -> None:
    assert failures.describe(error, 0).kind is FailureKind(kind)


@pytest.mark.parametrize(("failed", "kind"), [(1, "out_of_memory"), (0, "other")])
def test_a_convolution_without_an_engine_lacks_memory_if_an_allocation_failed(
    failed: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch tries all engines, and raises the same error for a format that no engine has."""
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"num_ooms": failed})
    error = RuntimeError("GET was unable to find an engine to execute this computation")
    assert failures.describe(error, 0).kind is FailureKind(kind)


GLOO = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:561] "
NCCL = "NCCL error in: NCCLUtils.hpp:94, remote process exited or there was a network error"


@pytest.mark.parametrize(
    ("text", "is_lost"),
    [
        (f"{GLOO}Connection closed by peer [127.0.0.1]:51925. GLHF!", True),
        (f"{GLOO}Read error [127.0.0.1]:51925: Connection reset by peer", True),
        (f"{NCCL}, NCCL version 2.27\nncclRemoteError: A call failed", True),
        (f"{GLOO}Timed out waiting 1800000ms for recv operation", False),
        ("the download failed: Connection reset by peer", False),
    ],
)
def test_a_lost_rank_is_named_in_plain_words(
    text: str, is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}.items():
        monkeypatch.setenv(name, str(value))
    found = failures.describe(RuntimeError(text), 0)
    lost = "another rank's process or machine, or the network between them, was lost"
    assert (found.reason == f"{lost}: see the output of the other machines") == is_lost
    assert text in found.error
    assert not failures.shows_lost_rank(ConnectionResetError(text))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert (failures.reason(RuntimeError(text)) == lost) == is_lost


LATE = "; a GPU reports errors late: CUDA_LAUNCH_BLOCKING=1 shows the line that made it"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously",
            f"CUDA error: device-side assert triggered{LATE}",
        ),
        ("CUDA error: out of memory\nCompile with", "CUDA error: out of memory"),
        ("\nshapes differ\nby one", "shapes differ"),
        (
            "DataLoader worker (pid(s) 7) exited. Details are lost. Rerunning with num_workers=0",
            "DataLoader worker (pid(s) 7) exited; train.workers=0 may show its error",
        ),
        (
            'Error(s) in loading Net:\n\tMissing key: "a".\n\tx',
            'Error(s) in loading Net: Missing key: "a".',
        ),
        (
            "Caught RuntimeError in replica 1 on device 1.\nOriginal Traceback (most recent call "
            'last):\n  File "x.py"\nRuntimeError: shapes differ',
            "shapes differ",
        ),
        ("", ""),
    ],
)
def test_a_reason_is_one_line_and_the_error_has_the_rest(text: str, says: str) -> None:
    found = failures.describe(RuntimeError(text), 0)
    assert found.reason == f"RuntimeError: {says}".rstrip(": ") and text in found.error


def test_the_kind_comes_from_the_cause_that_a_traceback_shows() -> None:
    def failed(suppressed: bool) -> BaseException:
        try:
            try:
                raise torch.OutOfMemoryError("CUDA out of memory")
            except RuntimeError as cause:
                if suppressed:
                    raise RuntimeError("the forward failed") from None
                raise RuntimeError("the forward failed") from cause
        except RuntimeError as error:
            return error

    assert failures.describe(failed(suppressed=False), 0).kind is FailureKind.OUT_OF_MEMORY
    assert failures.describe(failed(suppressed=True), 0).kind is FailureKind.OTHER


def test_a_failure_comes_back_from_its_file(tmp_path: Path) -> None:
    late = Failure(2.0, 0, "lost contact", "", FailureKind.OTHER)
    early = Failure(1.0, 1, "diverged", "trace", FailureKind.NOT_FINITE)
    for failure in (late, early):
        failures.write(failure, tmp_path)
    assert failures.first(tmp_path) == early


@pytest.mark.parametrize("kind", [{}, {"kind": "of a later version"}])
def test_files_of_other_versions_are_read(tmp_path: Path, kind: dict[str, str]) -> None:
    fields = dataclasses.asdict(Failure(1.0, 0, "broken", "trace"))
    del fields["kind"]
    (tmp_path / "rank_0.json").write_text(json.dumps({**fields, **kind}))
    (tmp_path / "rank_1.json").write_text("[]")
    assert failures.first(tmp_path) == Failure(1.0, 0, "broken", "trace")
