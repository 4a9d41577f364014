"""Streams: divided among ranks and loading processes, read again, resumed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from rankzero.errors import UserError
from rankzero.experiment import Experiment, Train
from rankzero.launch.failures import DescribedError
from rankzero.ranks import Ranks
from rankzero.training.data import digest, sets
from rankzero.training.data.loader import BatchLoader
from rankzero.training.data.order import make_stream_order
from rankzero.training.data.stream import (
    StreamLoader,
    at_its_place,
    check,
    is_stream,
    make_loader,
)
from rankzero.training.distributed.world import World

CPU = torch.device("cpu")
ALONE = World(Ranks(), CPU)
LAYOUTS = [(1, 0), (1, 2), (2, 0), (2, 1), (3, 2)]
"""Ranks, and loading processes of each."""


class Shuffled(IterableDataset[Any]):
    """Numbers in an order that is drawn while they are read, each with a drawn number."""

    def __init__(self, count: int = 48) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        buffer = list(range(self.count))
        while buffer:
            index = buffer.pop(random.randrange(len(buffer)))
            yield torch.tensor([index, torch.rand(()).item(), np.random.rand()])


class Aware(Shuffled):
    """Divides itself among loading processes, as PyTorch's documentation shows."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        start, step = (info.id, info.num_workers) if info else (0, 1)
        for index in range(start, self.count, step):
            yield torch.tensor([index, torch.rand(()).item(), np.random.rand()])


class Divided(Aware):
    """Divides itself among ranks, too."""

    divided = True

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.rank, self.ranks = rank, ranks

    def __iter__(self) -> Iterator[Any]:
        for sample in super().__iter__():
            if int(sample[0]) // 8 % self.ranks == self.rank:
                yield sample


class Saved(Shuffled):
    """Can continue where it was."""

    place = 0

    def state_dict(self) -> Any:
        return {"place": self.place}

    def load_state_dict(self, state: Any) -> None:
        self.place = state["place"]

    def __iter__(self) -> Iterator[Any]:
        while self.place < self.count:
            self.place += 1
            yield torch.tensor([self.place - 1, torch.rand(()).item(), np.random.rand()])
        self.place = 0


def loader_of(dataset: Any, workers: int = 0, collate: Any = default_collate) -> StreamLoader:
    found = make_loader(dataset, CPU, seed=3, workers=workers, collate=collate)
    assert isinstance(found, StreamLoader)
    return found


def batches(loader: StreamLoader, rank: int, ranks: int, steps: int) -> Iterator[Any]:
    """Return the batches, of 4 samples of each rank."""
    order = make_stream_order(Train(batch_size=4 * ranks, steps=1000), 0, ranks)
    return loader.train_batches(order, rank, 0, steps)


def epoch_of(datasets: list[Any], workers: int) -> list[list[float]]:
    """Return the samples of as many steps as an epoch has, over all ranks."""
    ranks = len(datasets)
    return [
        row
        for rank, dataset in enumerate(datasets)
        for batch in batches(loader_of(dataset, workers), rank, ranks, 12 // ranks)
        for row in batch.tolist()
    ]


@pytest.mark.parametrize(("ranks", "workers"), LAYOUTS)
@pytest.mark.parametrize("kind", [Shuffled, Aware, Saved])
def test_an_epoch_has_every_sample_once(kind: Any, ranks: int, workers: int) -> None:
    found = epoch_of([kind() for _ in range(ranks)], workers)
    assert sorted(int(row[0]) for row in found) == list(range(48))
    assert len({row[1] for row in found}) == len({row[2] for row in found}) == 48


def test_a_stream_of_the_users_own_package_datasets_is_an_ordinary_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Shuffled, "__module__", "datasets.mine")
    assert len(next(batches(loader_of(Shuffled(), 1), 0, 2, 1)))


def test_a_stream_that_divides_itself_is_left_alone() -> None:
    for workers in (0, 2):
        found = epoch_of([Divided(rank, 2) for rank in (0, 1)], workers)
        assert sorted(int(row[0]) for row in found) == list(range(48))
        assert len({row[1] for row in found}) == 48


def test_the_length_of_a_stream_that_divides_itself_is_that_of_a_rank() -> None:
    class Share(Divided):
        def __len__(self) -> int:
            return 26

    class Tars(Share):
        """With a `with_length()`, which names the samples of all ranks."""

        __module__ = "webdataset.compat"

    world: Any = SimpleNamespace(gather=lambda _: torch.tensor([[26], [22]]))
    experiment = Experiment(train=Train(batch_size=4, epochs=1))
    assert sets.batch_order(experiment, world, Share(0, 2), 2).steps_per_epoch == 12
    assert sets.batch_order(experiment, world, Tars(0, 2), 2).steps_per_epoch == 6
    world.is_distributed, world.ranks_that_differ = True, lambda _: []
    sets.check_same(world, "data()", {"training": Share(0, 2)}, Train())
    for share, notices in (Share(0, 2), 0), (Tars(0, 2), 1):
        described = [digest.describe(share, "training", "file.py")]
        assert len([*sets.differing(world, described, {"training": share})]) == notices
    with pytest.raises(UserError, match="26 samples on rank 0; 22 samples on rank 1"):
        sets.check_same(world, "data()", {"training": Tars(0, 2)}, Train())


@pytest.mark.parametrize("strategy", ["tp", "pp"])
def test_a_stream_that_divides_itself_is_refused_where_ranks_share_samples(strategy: Any) -> None:
    train = Train(strategy=strategy)
    with pytest.raises(UserError, match=f"divided = True, and under train.strategy={strategy} all"):
        check("training", Divided(0, 2), is_distributed=True, train=train)
    check("training", Divided(0, 1), is_distributed=False, train=train)


class Sized:
    """Says that it has `length` samples."""

    def __init__(self, read: range, length: int) -> None:
        self.read, self.length = read, length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(self.read)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_divides_itself_silently_is_refused(workers: int) -> None:
    says = r"63 samples, and an epoch had 31 on a rank.*set divided = True.*__len__ counts"
    with pytest.raises((UserError, DescribedError), match=says):
        list(batches(loader_of(Sized(range(1, 63, 2), 63), workers), 1, 2, 10))
    with pytest.raises((UserError, DescribedError), match=says):
        list(loader_of(Sized(range(1, 63, 2), 63), workers).eval_batches(4, 1, 2))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_divides_itself_counts_no_other_ranks(workers: int) -> None:
    class Whole(Divided):
        length = 48

        def __len__(self) -> int:
            return self.length

    with pytest.raises(DescribedError, match=r"48 samples.* one of .*the samples of one rank"):
        list(batches(loader_of(Whole(0, 2), workers), 0, 2, 13))
    assert len(list(loader_of(Whole(0, 2), workers).eval_batches(24, 0, 2))) == 1 + workers // 2
    Whole.length = 24
    assert len(list(batches(loader_of(Whole(0, 2), workers), 0, 2, 13))) == 13
    Whole.length = 48
    assert len(list(batches(loader_of(Whole(0, 1), workers), 0, 1, 13))) == 13


@pytest.mark.parametrize(
    ("read", "length", "ranks"), [(48, 48, 2), (40, 48, 2), (24, 48, 1), (5, 8, 2)]
)
def test_a_stream_of_about_its_length_is_read(read: int, length: int, ranks: int) -> None:
    assert len(list(batches(loader_of(Sized(range(read), length)), 0, ranks, 10))) == 10


def test_any_object_that_can_only_be_iterated_is_a_stream() -> None:
    class Plain:
        def __iter__(self) -> Iterator[int]:
            return iter(range(48))

    assert is_stream(Plain()) and is_stream(Shuffled()) and is_stream(iter([1]))
    assert not is_stream([1]) and not is_stream(torch.zeros(3))
    assert isinstance(make_loader([1], CPU, seed=0, workers=0, collate=list), BatchLoader)
    first = next(batches(loader_of(Plain()), 1, 2, 1))
    assert first.tolist() == [1, 3, 5, 7]


class OwnOrder(Shuffled):
    """Shuffles by a generator of its own."""

    def __init__(self, seed: int | None) -> None:
        super().__init__()
        self.seed = seed

    def __iter__(self) -> Iterator[Any]:
        order = list(range(self.count))
        random.Random(self.seed).shuffle(order)
        return iter({"image": torch.full((9, 9), float(one)), "name": str(one)} for one in order)


@pytest.mark.parametrize(("ranks", "workers"), [(1, 2), (2, 0)])
def test_parts_that_read_other_orders_are_noticed_once(ranks: int, workers: int) -> None:
    def notices(loaders: list[StreamLoader]) -> list[str]:
        for rank, one in enumerate(loaders):
            list(batches(one, rank, ranks, 4))
        saved = [one.state() for one in loaders]
        return [*loaders[0].compare(saved), *loaders[0].compare(saved)]

    for kind in (lambda: OwnOrder(7), Shuffled, lambda: Divided(0, 1)):
        assert notices([loader_of(kind(), workers) for _ in range(ranks)]) == []
    # The first of all samples may be the same by chance.
    found = (notices([loader_of(OwnOrder(None), workers) for _ in range(ranks)]) for _ in range(5))
    (text,) = next(filter(None, found))
    assert "other first samples" in text and "shuffle with a seed" in text


def test_the_next_epoch_begins_where_the_stream_ends() -> None:
    rows = [row for batch in batches(loader_of(Shuffled(10), 1), 0, 1, 10) for row in batch]
    epochs = [[int(row[0]) for row in rows[start : start + 10]] for start in range(0, 40, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4, "each epoch has an order of its own"


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("read", [0, 1, 5, 12, 13])
def test_resume_is_exact_with_a_state(workers: int, read: int) -> None:
    straight = [batch.tolist() for batch in batches(loader_of(Saved(), workers), 0, 1, 20)]
    first, second = loader_of(Saved(), workers), loader_of(Saved(), workers)
    begun = batches(first, 0, 1, 20)
    assert [next(begun).tolist() for _ in range(read)] == straight[:read]
    assert second.resume([first.state()], 0, same_layout=True) == ""
    assert [batch.tolist() for batch in batches(second, 0, 1, 20 - read)] == straight[read:]
    assert torch.equal(second.state(), loader_after(Saved(), workers, 20).state())


def loader_after(dataset: Any, workers: int, steps: int) -> StreamLoader:
    loader = loader_of(dataset, workers)
    list(batches(loader, 0, 1, steps))
    return loader


class Ordered(Saved):
    """Draws an order of its epoch in `set_epoch`, and another one at the start of an `__iter__`."""

    def set_epoch(self, epoch: int) -> None:
        self.files = torch.randperm(self.count).tolist()

    def __iter__(self) -> Iterator[Any]:
        rows = np.random.permutation(self.count)
        return (torch.tensor([self.files[int(i)], rows[int(i)]]) for i, *_ in super().__iter__())


def test_a_resume_keeps_an_order_that_is_drawn_when_an_epoch_begins() -> None:
    straight = [batch.tolist() for batch in batches(loader_of(Ordered()), 0, 1, 20)]
    first, second = loader_after(Ordered(), 0, 5), loader_of(Ordered())
    assert second.resume([first.state()], 0, same_layout=True) == ""
    torch.manual_seed(1)  # as the model's numbers
    assert [batch.tolist() for batch in batches(second, 0, 1, 15)] == straight[5:]


def test_what_collate_draws_is_the_same_after_a_resume() -> None:
    def collate(samples: list[Any]) -> Any:
        return torch.rand(2)

    straight = [b.tolist() for b in batches(loader_of(Saved(), 2, collate), 0, 1, 9)]
    assert len({tuple(one) for one in straight}) == 9
    first, second = loader_of(Saved(), 2, collate), loader_of(Saved(), 2, collate)
    list(batches(first, 0, 1, 5))
    second.resume([first.state()], 0, same_layout=True)
    assert [batch.tolist() for batch in batches(second, 0, 1, 4)] == straight[5:]


class Asking(Saved):
    """Has a state as MosaicML's streams have it."""

    def state_dict(self, num_samples: int) -> Any:  # type: ignore[override]
        raise NotImplementedError


@pytest.mark.parametrize(
    ("kind", "workers", "same_layout", "why"),
    [
        (Shuffled, 0, True, "no state_dict()"),
        (Asking, 0, True, "no state_dict() without arguments"),
        (Saved, 2, True, "other processes or loading processes"),
        (Saved, 0, False, "other processes or loading processes"),
    ],
)
def test_a_resume_that_is_not_exact_reads_from_the_first_sample(
    kind: Any, workers: int, same_layout: bool, why: str
) -> None:
    # The ranks of another layout may be in different epochs.
    states = [loader_after(kind(), 0, steps).state() for steps in (3, 30)]
    loader = loader_of(kind(), workers)
    problem = loader.resume(states, 0, same_layout=same_layout)
    assert "not exact" in problem and why in problem and problem.endswith("as epoch 3")
    rows = [int(row[0]) for batch in batches(loader, 0, 1, 12) for row in batch]
    assert sorted(rows) == list(range(48))


def test_the_shuffle_buffer_of_a_hugging_face_stream_is_not_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The classes of `datasets` have these names. tests/frameworks has the real ones."""

    class Examples:
        ex_iterable: Any = None

    class Mixed:
        def __init__(self, *parts: Any) -> None:
            self.ex_iterables = parts

    class BufferShuffledExamplesIterable(Examples):
        generator = np.random.default_rng(1)

    class Hub(Saved):
        __module__ = "datasets.iterable_dataset"
        num_shards = 1
        _ex_iterable: Any = Examples()

    state = loader_after(Hub(), 0, 5).state()
    assert loader_of(Hub()).resume([state], 0, same_layout=True) == ""
    shuffled = Hub()
    shuffled._ex_iterable.ex_iterable = Mixed(Examples(), BufferShuffledExamplesIterable())
    loader = loader_of(shuffled)
    problem = loader.resume([state], 0, same_layout=True)
    assert "not exact" in problem and "leaves out its shuffle buffer" in problem
    assert torch.equal(loader.state(), state), "the place is restored"
    check("training", shuffled, is_distributed=True, train=Train())
    BufferShuffledExamplesIterable.generator = np.random.default_rng()
    with pytest.raises(UserError, match=r"a Hugging Face stream that .*pass seed=.* interleaves"):
        check("training", shuffled, is_distributed=True, train=Train())
    check("training", shuffled, is_distributed=False, train=Train())
    assert loader.resume([state], 0, same_layout=True).endswith("shuffles without a seed")
    monkeypatch.setattr(np, "__version__", "1.26.4")  # whose copies of a generator have no seed
    check("training", shuffled, is_distributed=True, train=Train())


@pytest.mark.parametrize(("ranks", "workers"), LAYOUTS)
def test_each_evaluation_reads_the_whole_stream(ranks: int, workers: int) -> None:
    loaders = [loader_of(Shuffled(23), workers) for _ in range(ranks)]
    torch.manual_seed(0)
    for _ in range(2):
        found = [one for r in range(ranks) for one in loaders[r].eval_batches(4, r, ranks)]
        assert sorted(int(row[0]) for batch, _ in found for row in batch) == list(range(23))
        assert [len(batch) for batch, _ in found] == [samples for _, samples in found]
    drawn = torch.rand(1)
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.rand(1)), "reading drew from the model's generator"


def test_a_stream_that_is_too_short_or_cannot_be_read_twice_is_refused() -> None:
    with pytest.raises(DescribedError, match=r"epoch 0 of the stream has 1 samples, and none for"):
        list(batches(loader_of(Shuffled(1)), 1, 2, 3))
    with pytest.raises(DescribedError, match=r"epoch 1 of the stream has 0 samples.*begin again"):
        list(batches(loader_of(iter([torch.ones(1)] * 9)), 0, 1, 3))


@pytest.mark.parametrize("once", [iter([1]), (x for x in [1]), map(int, [1])])
def test_an_iterator_that_nothing_can_begin_again_is_refused(once: Any) -> None:
    with pytest.raises(UserError, match=r"the validation set is a .*, which can be read only once"):
        sets.check_same(ALONE, "data()", {"training": [1], "validation": once}, Train())

    class Again:
        def __iter__(self) -> Any:
            self.place = 0
            return self

        def __next__(self) -> int:
            raise StopIteration

    sets.check_same(ALONE, "data()", {"training": [1], "validation": Again()}, Train())


def test_tars_that_divide_themselves_or_shuffle_without_a_seed_are_refused() -> None:
    """The classes of `webdataset` have these names."""

    def split_by_node(src: Any) -> Any:
        return src

    class Tars(Shuffled):
        __module__ = "webdataset.compat"
        divided = False

        def __init__(self, *pipeline: Any) -> None:
            super().__init__()
            self.pipeline = [list, *pipeline]

    tars = Tars(split_by_node)
    with pytest.raises(UserError, match=r"WebDataset with split_by_node.* set divided = True"):
        check("training", tars, is_distributed=True, train=Train())
    check("training", tars, is_distributed=False, train=Train())
    check("training", Tars(), is_distributed=True, train=Train())

    def _shuffle(data: Any, **options: Any) -> Any:
        return data

    for options in ({"seed": 0}, {"rng": random.Random(1)}):
        check(
            "training",
            Tars(SimpleNamespace(f=_shuffle, kw=options)),
            is_distributed=True,
            train=Train(),
        )
    stage = SimpleNamespace(f=_shuffle, args=(1000, 100, random.Random(1)), kw={})
    check("training", Tars(stage), is_distributed=True, train=Train())
    tars.pipeline = [SimpleNamespace(f=_shuffle, kw={})]
    with pytest.raises(UserError, match=r"a WebDataset that shuffles without a seed.*pass rng="):
        check("training", tars, is_distributed=False, train=Train())
    sets.check_same(ALONE, "data()", {"training": tars}, Train(workers=1))
    tars.divided = True
    check("training", tars, is_distributed=True, train=Train())


def test_an_example_batch_of_a_pipeline_leaves_the_stream_at_its_place() -> None:
    dataset = Saved()
    with at_its_place(dataset):
        (first,) = itertools.islice(batches(loader_of(dataset), 0, 1, 1), 1)
    (again,) = itertools.islice(batches(loader_of(dataset), 0, 1, 1), 1)
    assert torch.equal(first, again)
    with at_its_place(Shuffled()):
        pass


def test_errors_name_the_sample_and_the_line() -> None:
    def broken() -> Iterator[int]:
        yield from range(6)
        raise ValueError("a torn file")

    with pytest.raises(DescribedError, match=r"^ValueError: a torn file \(.*test_stream\.py, line"):
        list(batches(loader_of(broken()), 0, 1, 3))
    with pytest.raises(DescribedError, match=r"in broken\): sample 6 of the training set$"):
        list(batches(loader_of(broken(), 1), 0, 1, 3))


def test_a_state_that_no_checkpoint_takes_is_refused_at_once() -> None:
    class Odd(Saved):
        def state_dict(self) -> Any:
            return {"place": np.random.RandomState(0)}

    with pytest.raises(DescribedError, match="must return tensors and plain values"):
        list(batches(loader_of(Odd()), 0, 1, 1))


def test_a_state_dict_in_c_without_a_signature_is_one() -> None:
    class Compiled(Saved):
        state_dict = property(lambda _: {}.update)  # type: ignore[assignment]

    state = loader_after(Saved(), 0, 5).state()
    assert loader_of(Compiled()).resume([state], 0, same_layout=True) == ""


def test_a_stream_without_a_length_needs_steps() -> None:
    with pytest.raises(UserError, match=r"without a length.*set train\.steps"):
        make_stream_order(Train(batch_size=4), 0, 1)
    assert make_stream_order(Train(batch_size=4, steps=9), 0, 1).steps_per_epoch == 9
    known = make_stream_order(Train(batch_size=4, steps=9), 40, 2)
    assert (known.steps_per_epoch, known.micro_batch, known.samples) == (10, 2, 40)


def test_a_stream_has_no_indices_and_no_equal_batches() -> None:
    class Choosing(Experiment):
        def batches(self, data: Any, epoch: int, generator: Any) -> Any:
            return [[0, 1]]

    with pytest.raises(UserError, match="chooses by index, but the training set is a stream"):
        sets.batch_order(Choosing(), ALONE, Shuffled(), 1)
    with pytest.raises(UserError, match=r"lockstep = True needs equal batches"):
        next(loader_of(Shuffled()).eval_batches(4, 0, 2, lockstep=True))


def test_the_digest_of_a_stream_is_that_of_its_use_and_source() -> None:
    class Around(Shuffled):
        def __init__(self) -> None:
            self.inner, self.mean = iter([]), torch.zeros(3)

        def __len__(self) -> int:
            return len(self.inner)  # type: ignore[arg-type]

    for dataset in (Around(), Shuffled()):
        found = digest.describe(dataset, "training", "file.py:Mine")
        name = type(dataset).__name__
        assert (found.how, found.samples, found.name) == ("its use, its source", 0, name)
    # The file's path depends on the working directory.
    again = digest.describe(Shuffled(), "training", "../of/file.py:Mine")
    others = [
        digest.describe(Shuffled(), context, file)
        for context, file in (("validation", "file.py:Mine"), ("training", "other.py:Mine"))
    ]
    assert again.digest == found.digest not in [other.digest for other in others]


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ((DataLoader([1]), [1]), r"a DataLoader as a data set: return its \.dataset"),
        (([1], {"near": DataLoader([1])}), r"a DataLoader as a data set: return its \.dataset"),
        ({"train": [1], "validation": [1]}, r"the text 'train' as a data set: .* sets\['train'\]"),
    ],
)
def test_what_is_no_data_set_is_refused(found: Any, message: str) -> None:
    class Mistaken(Experiment):
        def data(self) -> Any:
            return found

    with pytest.raises(UserError, match=message):
        sets.load(Mistaken())
