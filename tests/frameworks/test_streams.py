"""Data of other packages: Hugging Face streams, tars, graphs. Each test needs its package."""

from __future__ import annotations

import gc
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

from rankzero.errors import UserError
from rankzero.experiment import Train
from rankzero.training.data.loader import BatchLoader
from rankzero.training.data.order import BatchOrder, make_stream_order
from rankzero.training.data.stream import StreamLoader, check

CPU = torch.device("cpu")


def numbers(loader: StreamLoader, rank: int, ranks: int, steps: int) -> list[int]:
    """Return the numbers in batches of 5 samples of each rank."""
    order = make_stream_order(Train(batch_size=5 * ranks, steps=1000), 0, ranks)
    return [one for batch in loader.train_batches(order, rank, 0, steps) for one in batch]


def collate(samples: list[Any]) -> list[int]:
    return [int(sample["number"]) for sample in samples]


def loader_of(stream: Any, workers: int, ranks: int) -> StreamLoader:
    return StreamLoader(stream, CPU, seed=3, workers=workers, collate=collate, ranks=ranks)


def hugging_face(folder: Path, shuffled: bool) -> Any:
    """Return 60 samples in 4 shards of local files."""
    datasets = pytest.importorskip("datasets")
    files = []
    for shard in range(4):
        path = folder / f"{shard}.jsonl"
        rows = [json.dumps({"number": 15 * shard + row}) for row in range(15)]
        path.write_text("\n".join(rows), encoding="utf-8")
        files.append(str(path))
    found = datasets.load_dataset(
        "json", data_files=files, split="train", streaming=True, cache_dir=str(folder / "cache")
    )
    return found.shuffle(seed=1, buffer_size=10) if shuffled else found


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (1, 2), (2, 0), (2, 2), (3, 1)])
def test_hugging_face_streams_are_divided_and_resumed(
    tmp_path: Path, ranks: int, workers: int, shuffled: bool
) -> None:
    def fresh() -> StreamLoader:
        return loader_of(hugging_face(tmp_path, shuffled), workers, ranks)

    found = [numbers(fresh(), rank, ranks, 12 // ranks) for rank in range(ranks)]
    assert sorted(one for rank in found for one in rank) == list(range(60))
    straight = numbers(fresh(), 0, ranks, 30)
    for read in (7, 24):
        first, second = fresh(), fresh()
        assert numbers(first, 0, ranks, read) == straight[: 5 * read]
        problem = second.resume([first.state()], 0, same_layout=True)
        assert ("shuffle buffer" in problem) == shuffled
        later = numbers(second, 0, ranks, 30 - read)
        # The buffer of a shuffle is not in the state: Hugging Face fills it again.
        assert shuffled or later == straight[5 * read :]


def test_a_shuffle_without_a_seed_is_refused(tmp_path: Path) -> None:
    plain = hugging_face(tmp_path, shuffled=False)
    check(
        "training", plain.shuffle(seed=0, buffer_size=5).take(9), is_distributed=True, train=Train()
    )
    with pytest.raises(UserError, match="a Hugging Face stream that shuffles without a seed"):
        check("training", plain.shuffle(buffer_size=5).take(9), is_distributed=True, train=Train())
    wds = pytest.importorskip("webdataset")
    tars = wds.WebDataset(["0.tar"], shardshuffle=4, nodesplitter=None)
    check("training", tars.shuffle(9, seed=0).decode(), is_distributed=True, train=Train())
    with pytest.raises(UserError, match="a WebDataset that shuffles without a seed"):
        check("training", tars.shuffle(9).decode(), is_distributed=False, train=Train())


@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (1, 2), (2, 0), (2, 2)])
def test_tars_are_divided(tmp_path: Path, ranks: int, workers: int) -> None:
    wds = pytest.importorskip("webdataset")
    urls = []
    for shard in range(4):
        path = tmp_path / f"{shard}.tar"
        with tarfile.open(path, "w") as tar:
            for row in range(15):
                content = json.dumps(15 * shard + row).encode()
                info = tarfile.TarInfo(f"{15 * shard + row:03d}.json")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
        urls.append(str(path))

    def stream() -> Any:
        tars = wds.WebDataset(urls, shardshuffle=False).decode()
        return tars.map(lambda sample: {"number": sample["json"]})

    found = [
        numbers(loader_of(stream(), workers, ranks), r, ranks, 12 // ranks) for r in range(ranks)
    ]
    assert sorted(one for rank in found for one in rank) == list(range(60))
    # WebDataset leaves open files to the garbage collector. It must not find them in another test.
    gc.collect()


def test_graphs_are_batched_in_loading_processes() -> None:
    graphs = pytest.importorskip("torch_geometric.data")
    dataset = [
        graphs.Data(x=torch.full((3 + number % 4, 2), float(number)), y=torch.tensor([number]))
        for number in range(40)
    ]
    loader = BatchLoader(dataset, CPU, seed=3, workers=2, collate=graphs.Batch.from_data_list)
    found = list(loader.train_batches(BatchOrder(40, 8, 8, 1, 3), 0, 0, 5))
    assert [batch.num_graphs for batch in found] == [8] * 5
    assert sorted(int(y) for batch in found for y in batch.y) == list(range(40))
