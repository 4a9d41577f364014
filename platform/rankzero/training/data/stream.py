"""Streams: data sets that can only be read in their own order, of any length.

    rank 0 ─┬─ loading process 0: part 0      Each part reads the stream and keeps every fourth
            └─ loading process 1: part 1      sample, or reads its own shards if the stream divides
    rank 1 ─┬─ loading process 0: part 2      itself. At the end it begins the next epoch. So all
            └─ loading process 1: part 3      ranks take equally many steps.

A part sends its place with every batch. A checkpoint stores the places of the batches that were
trained on. So a resume is exact if the stream has `state_dict` and `load_state_dict`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import inspect
import io
import itertools
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from rankzero.errors import UserError
from rankzero.experiment import Train
from rankzero.launch.failures import Failure
from rankzero.ranks import SAME_SAMPLES
from rankzero.training.data import processes
from rankzero.training.data.loader import EVALUATION_WORKERS, BatchLoader
from rankzero.training.data.order import BatchOrder, mix
from rankzero.training.data.samples import (
    BatchMaker,
    Collate,
    batch_maker,
    preserved_rng,
    seed_all,
)
from rankzero.training.distributed.world import World

_NO_SEED = (
    "the {name} set is a {kind} that shuffles without a seed: each process would read another "
    "order, and train on some samples twice and on others never; pass {seed} where it shuffles or "
    "interleaves"
)
_OTHER_ORDERS = (
    "processes read other first samples of the training set, which is a stream: if its order "
    "differs, they train on some samples twice and on others never; shuffle with a seed, such as "
    "self.train.seed, or let the stream divide itself and set divided = True on it"
)
_NOT_THE_SAME = (
    "the {name} set has divided = True, and under train.strategy={strategy} all ranks need equal "
    "samples: leave divided = True out, and let every rank read all samples"
)
_DIVIDED_TWICE = (
    "the stream says that it has {length} samples, and an epoch had {read} on a rank: it divides "
    "itself among the ranks, and RankZero divides it, too; set divided = True on it, or let every "
    "rank read all samples. Or __len__ counts samples that __iter__ leaves out: let it return how "
    "many __iter__ yields"
)
_COUNTS_ALL = (
    "the stream says that it has {length} samples, and an epoch had {read} in one of {shares} "
    "processes: with divided = True, let __len__ return the samples of one rank"
)


def is_stream(dataset: Any) -> bool:
    """Return whether a data set can only be iterated."""
    # PyTorch's IterableDataset inherits a __getitem__ that raises.
    has_items = hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)
    return hasattr(dataset, "__iter__") and not has_items


def length_of(dataset: Any) -> int:
    """Return the samples of a data set, or 0 if it is a stream of unknown length.

    Raises UserError for a DataLoader, a text, a list of data sets, or a tuple ``(x, y)`` of arrays.
    A mapping of data sets, unpacked, is its keys.
    """
    if isinstance(dataset, DataLoader):
        raise UserError(
            "the experiment returned a DataLoader as a data set: return its .dataset; batch size, "
            "workers and order are settings"
        )
    if isinstance(dataset, str):
        raise UserError(
            f"the experiment returned the text {dataset!r} as a data set: return the data sets "
            "themselves, for example sets['train'], sets['validation']"
        )
    if isinstance(dataset, (list, tuple)) and dataset and isinstance(dataset[0], Dataset):
        raise UserError(
            f"the experiment returned a {type(dataset).__name__} of data sets as a data set: "
            "several validation sets are a mapping {name: set}, and several training sets a "
            "torch.utils.data.ConcatDataset"
        )
    if isinstance(dataset, tuple) and _are_columns(dataset):
        raise UserError(
            f"the experiment returned a tuple of {len(dataset)} arrays as a data set: wrap them as "
            "torch.utils.data.TensorDataset(x, y), of tensors"
        )
    try:
        return len(dataset)
    except TypeError:
        if is_stream(dataset):
            return 0
        raise


def _are_columns(arrays: tuple[Any, ...]) -> bool:
    """Return whether these are a few arrays with a row for each sample, as in ``(x, y)``."""
    rows = {tuple(getattr(one, "shape", ()))[:1] for one in arrays[:5]}
    return 1 < len(arrays) < 5 and len(rows) == 1 and max(rows) > (len(arrays),)


def is_empty(dataset: Any) -> bool:
    """Return whether a data set has no samples. A stream may not know its length."""
    return not is_stream(dataset) and len(dataset) == 0


def counts_a_share(dataset: Any) -> bool:
    """Return whether the length of a stream is that of this rank's share."""
    # People pass the samples of all ranks to with_length() of a WebDataset.
    is_divided = is_stream(dataset) and getattr(dataset, "divided", False)
    return bool(is_divided) and not _is_of(dataset, "webdataset")


def check(name: str, dataset: Any, *, is_distributed: bool, train: Train) -> None:
    """Raise UserError for a stream that can be read only once, or that is divided wrongly."""
    # A class may begin again in an __iter__ that returns self. No iterator of Python does.
    iterates = getattr(type(dataset), "__iter__", None)
    if hasattr(dataset, "__next__") and not inspect.isfunction(iterates):
        raise UserError(
            f"the {name} set is a {type(dataset).__name__}, which can be read only once: return an "
            "object of which __iter__ begins again at each call"
        )
    # The loading processes of a rank get one generator.
    if is_distributed and any(map(_is_unseeded, _parts_of(dataset))):
        seed = "seed=self.train.seed"
        raise UserError(_NO_SEED.format(name=name, kind="Hugging Face stream", seed=seed))
    is_divided = getattr(dataset, "divided", False)
    if is_divided and is_distributed and train.strategy in SAME_SAMPLES:
        raise UserError(_NOT_THE_SAME.format(name=name, strategy=train.strategy))
    if not is_divided and _is_of(dataset, "webdataset"):
        _check_stages(name, getattr(dataset, "pipeline", ()), is_distributed, train.workers)


def _check_stages(
    name: str, stages: Sequence[Any], is_distributed: bool, workers: int | None
) -> None:
    """Raise UserError for a WebDataset that divides itself, or shuffles without a seed."""
    is_alone = not is_distributed and workers in (0, 1)
    for stage in stages:
        given = getattr(stage, "kw", {})
        is_shuffle = getattr(getattr(stage, "f", None), "__name__", "") == "_shuffle"
        seeds = (given.get("seed"), given.get("rng"), *getattr(stage, "args", ())[2:])
        if is_shuffle and all(one is None for one in seeds) and not is_alone:
            # With seed=, each epoch would have the order of the first.
            seed = "rng=random.Random(self.train.seed)"
            raise UserError(_NO_SEED.format(name=name, kind="WebDataset", seed=seed))
        splitter = getattr(stage, "__name__", "")
        if is_distributed and splitter in ("split_by_node", "single_node_only"):
            raise UserError(
                f"the {name} set is a WebDataset with {splitter}, and RankZero divides it, too: "
                "set nodesplitter=None, or use split_by_node and set divided = True on the data set"
            )


@contextlib.contextmanager
def at_its_place(dataset: Any) -> Iterator[None]:
    """Put a stream back, after the block, to where it was."""
    state = copy.deepcopy(dataset.state_dict()) if _has_state(dataset) else None
    yield
    if state is not None:
        dataset.load_state_dict(state)


@dataclasses.dataclass(frozen=True)
class _Place:
    """The place of a part of a stream, after a batch."""

    epoch: int = 0
    position: int = 0
    """Samples read of the epoch, also those that belong to other parts."""
    batches: int = 0
    """Made by this part since the start of the run."""
    inner: bytes | None = None
    """The result of the stream's `state_dict`, as PyTorch saves it."""
    first: int = 0
    """The checksum of the epoch's first sample: equal in parts that read one order. 0: unknown."""


class StreamLoader:
    """One rank's batches of a stream, on `device`."""

    def __init__(
        self,
        dataset: Any,
        device: torch.device,
        *,
        seed: int,
        workers: int,
        collate: Collate,
        ranks: int = 1,
    ) -> None:
        self.device, self.dataset = device, dataset
        self.samples = length_of(dataset)
        """0 if unknown."""
        self._seed, self._collate = seed, collate
        self._workers = _useful_workers(dataset, ranks, workers)
        self._evaluation: DataLoader[Any] | None = None
        # The batches that were read, and the place of each loading process: at the start of
        # `train_batches`, and now.
        self._start = self._now = 0, (_Place(),) * max(1, self._workers)
        self._is_compared = False

    def train_batches(
        self, order: BatchOrder, rank: int, first_step: int, total_steps: int
    ) -> Iterator[Any]:
        """Yield `rank`'s micro-batches of all steps from `first_step` on, on the device."""
        self._now = self._start
        maker = batch_maker(self._collate, self._seed, rank, training=True)
        part = _Part(self.dataset, maker, order.micro_batch, order.world_size, *self._start)
        loader = processes.make_loader(part, self.device, self._workers)
        count = (total_steps - first_step) * order.accumulation
        for batch, _, worker, place in itertools.islice(processes.load(loader, self.device), count):
            read, places = self._now
            self._now = read + 1, (*places[:worker], place, *places[worker + 1 :])
            yield batch

    def eval_batches(
        self, batch_size: int, rank: int, world_size: int, *, lockstep: bool = False
    ) -> Iterator[tuple[Any, int]]:
        """Yield `rank`'s share of the stream once, on the device: batches and their samples."""
        if lockstep:
            raise UserError(
                "lockstep = True needs equal batches on all ranks, and a stream to evaluate has no "
                "length: return a map-style data set"
            )
        if self._evaluation is None:
            maker = batch_maker(self._collate, self._seed, rank, training=False)
            part = _Part(self.dataset, maker, batch_size, world_size)
            workers = min(self._workers, EVALUATION_WORKERS)
            self._evaluation = processes.make_loader(part, self.device, workers, persistent=True)
        for batch, samples, *_ in processes.load(self._evaluation, self.device):
            yield batch, samples

    def state(self) -> Tensor:
        """Return what `resume` needs: where the batches end that were trained on. As bytes."""
        read, places = self._now
        state = {"read": read, "places": [dataclasses.astuple(place) for place in places]}
        return torch.frombuffer(bytearray(_packed(state)), dtype=torch.uint8)

    def compare(self, states: Sequence[Tensor]) -> Iterator[str]:
        """Yield at most a notice that processes read other orders, after what `states` returned.

        Only the first call compares.
        """
        states, self._is_compared = () if self._is_compared else states, True
        saved = [_unpacked(state.numpy().tobytes()) for state in states]
        places = {_Place(*place) for one in saved for place in one["places"]}
        firsts = {(place.epoch, place.first) for place in places if place.first}
        if len(firsts) > len({epoch for epoch, _ in firsts}):
            yield _OTHER_ORDERS

    def resume(self, states: Sequence[Tensor], rank: int, *, same_layout: bool) -> str:
        """Continue after what `state` returned on each rank. Return why it is not exact, or ''.

        `same_layout`: whether each rank has the samples and the place that it had before.
        """
        if not states:
            raise UserError("the checkpoint's training set was no stream: start a new run instead")
        saved = [_unpacked(state.numpy().tobytes()) for state in states]
        if not _has_state(self.dataset):
            why = "it has no state_dict() without arguments, or no load_state_dict()"
        elif not same_layout or len(saved[rank]["places"]) != max(1, self._workers):
            why = "there are other processes or loading processes than before"
        else:
            places = tuple(_Place(*place) for place in saved[rank]["places"])
            self._start = self._now = saved[rank]["read"], places
            parts = [*_parts_of(self.dataset)]
            if any(map(_is_unseeded, parts)):
                return "this resume is not exact: the training set shuffles without a seed"
            if all(type(one).__name__ != "BufferShuffledExamplesIterable" for one in parts):
                return ""
            return (
                "this resume is not exact: the state of a Hugging Face stream leaves out its "
                "shuffle buffer. This epoch leaves out the samples that were in the buffer"
            )
        # Another epoch, so that a stream that shuffles yields another order. The same on all ranks.
        epoch = 1 + max(_Place(*place).epoch for one in saved for place in one["places"])
        self._start = self._now = 0, (_Place(epoch),) * max(1, self._workers)
        return (
            f"this resume is not exact: the training set is a stream, and {why}. It is read from "
            f"its first sample again, as epoch {epoch}"
        )


Loader = BatchLoader | StreamLoader


def make_loader(dataset: Any, device: torch.device, *, ranks: int = 1, **options: Any) -> Loader:
    """Return the loader of a data set. `ranks`: the parts that each batch is divided into."""
    if is_stream(dataset):
        return StreamLoader(dataset, device, ranks=ranks, **options)
    return BatchLoader(dataset, device, **options)


def states(loader: Any, world: World) -> list[Tensor]:
    """Return every rank's state of a stream; nothing for other data. Collective."""
    if not isinstance(loader, StreamLoader):
        return []
    mine = loader.state()
    lengths = world.gather(torch.tensor([len(mine)])).flatten().tolist()
    padded = torch.nn.functional.pad(mine, (0, max(lengths) - len(mine)))
    found = world.gather(padded)
    return [state[:length].clone() for state, length in zip(found, lengths, strict=True)]


@dataclasses.dataclass(eq=False)
class _Part(IterableDataset[Any]):
    """A rank's batches of a stream; in a loading process, those of this process.

    Yields (batch, samples, loading process, place), or a Failure of the user's code. None means
    that the next process has the next batch. Has no end, except without `places`: then one epoch.
    """

    stream: Any
    maker: BatchMaker
    batch_size: int
    ranks: int
    read: int = 0
    places: tuple[_Place, ...] = ()
    worker: tuple[int, int] | None = None

    def __iter__(self) -> Iterator[Any]:
        if self.worker is None:
            info = get_worker_info()
            self.worker = (info.id, info.num_workers) if info else (0, 1)
        worker, workers = self.worker
        number = self.maker.rank * workers + worker
        stream, divides_itself = self.stream, bool(getattr(self.stream, "divided", False))
        if not divides_itself:
            # A stream that asks for its loading process would divide again what is divided here.
            torch_worker._worker_info = None
        if _is_hugging_face(stream):
            stream = _own_shards(stream, self.maker.rank, self.ranks, worker, workers)
            divides_itself = True
        place, is_endless = self.places[worker] if self.places else _Place(), bool(self.places)
        part, parts, salt, shares = number, self.ranks * workers, 0, self.ranks
        if divides_itself:
            # The length of a set to evaluate decides nothing.
            counts_all = is_endless and self.ranks > 1 and counts_a_share(stream)
            shares = parts if counts_all else 1
            part, parts, salt = 0, 1, number + 1
        maker = dataclasses.replace(self.maker, rank=number)
        reader = _Reader(stream, maker, part, parts, salt, place, is_endless, shares)
        # The batches come from one process after the other. These were read in the last attempt.
        if worker < self.read % workers:
            yield None
        while True:
            with preserved_rng():
                found = reader.next_batch(self.batch_size)
            if found is None:
                return
            yield found if isinstance(found, Failure) else (*found, worker, reader.place)


@dataclasses.dataclass
class _Reader:
    """Reads a stream, keeps the samples of its part, and makes batches of them.

    Before each sample, the generators are seeded by epoch and position. So all parts read the same
    order. `salt` differs between the parts of a stream that divides itself.
    """

    stream: Any
    maker: BatchMaker
    part: int
    parts: int
    salt: int
    place: _Place
    """After the last batch."""
    is_endless: bool
    shares: int
    """The length divided by it is no legal size of the first epoch; 1 if every size is legal."""

    def __post_init__(self) -> None:
        self._epoch, self._position = self.place.epoch, self.place.position
        self._first, self._is_saved = self.place.first, self.is_endless and _has_state(self.stream)
        self._samples = self._read(self.place)

    def next_batch(self, size: int) -> tuple[Any, int] | Failure | None:
        """Return a batch and its samples, or None at the end."""
        where = None
        try:
            samples = list(itertools.islice(self._samples, size))
            where = f"collate() of the {len(samples)} samples"
            if not samples:
                return None
            batch = self.maker.make(self.place.batches, samples, seed_all)
            inner = None
            if self._is_saved:
                where = "state_dict()"
                inner = _packed(self.stream.state_dict())
                if self.place.inner is None:
                    _unpacked(inner)  # now, and not when a run resumes
        except Exception as error:
            return self.maker.failure(error, where or f"sample {self._position}")
        batches = self.place.batches + 1
        self.place = _Place(self._epoch, self._position, batches, inner, self._first)
        return batch, len(samples)

    def _read(self, place: _Place) -> Iterator[Any]:
        stream, inner, kept = self.stream, place.inner, place.position
        while True:
            self._seed(0)
            if hasattr(stream, "set_epoch"):
                stream.set_epoch(self._epoch)
            if inner is not None:
                stream.load_state_dict(_unpacked(inner))
            # As at the epoch's start, also after a resume: an order that is drawn here is the same.
            self._seed(0)
            iterator, inner = iter(stream), None
            while True:
                self._seed(self._position)
                try:
                    sample = next(iterator)
                except StopIteration:
                    break
                if not self._position and self.parts > 1:
                    self._first = _checksum(sample)
                mine = self._position % self.parts == self.part
                self._position += 1
                if mine:
                    kept += 1
                    yield sample
            self._refuse_a_share()
            if not self.is_endless:
                return
            if not kept:
                raise UserError(
                    f"epoch {self._epoch} of the stream has {self._position} samples, and none for "
                    f"part {self.part} of {self.parts}: set train.workers=0, or let __iter__ "
                    "begin again at each call"
                )
            self._epoch, self._position, kept = self._epoch + 1, 0, 0

    def _refuse_a_share(self) -> None:
        """Raise UserError if the first epoch was a share of the length, which is not expected."""
        length, read = length_of(self.stream), self._position
        is_share = read < length and abs(read * self.shares - length) < self.shares
        if self.shares > 1 and not self._epoch and is_share:
            why = _COUNTS_ALL if self.parts == 1 else _DIVIDED_TWICE
            raise UserError(why.format(length=length, read=read, shares=self.shares))

    def _seed(self, position: int) -> None:
        # All of them: a stream cannot be read again, so nobody can learn which ones it uses.
        seed_all(mix(self.maker.seed, self._epoch, position, self.salt))


def _own_shards(stream: Any, rank: int, ranks: int, worker: int, workers: int) -> Any:
    """Return the part of a Hugging Face stream for a loading process."""
    if workers > 1:
        # It would do that itself, but could not load its state (seen in datasets 5.2).
        stream = stream.shard(num_shards=workers, index=worker, contiguous=False)
    if ranks > 1 and getattr(stream, "_distributed", None) is None:
        split = importlib.import_module("datasets.distributed").split_dataset_by_node
        stream = split(stream, rank, ranks)
    return stream


def _useful_workers(stream: Any, ranks: int, wanted: int) -> int:
    """Return how many loading processes of a rank get samples, at most `wanted`."""
    if not _is_hugging_face(stream):
        return wanted
    # It divides whole shards among ranks if that is even, and then among loading processes.
    shards = int(stream.num_shards)
    return min(wanted, shards if shards % ranks else shards // ranks)


def _is_hugging_face(stream: Any) -> bool:
    # A user's own package may have the name, too.
    return _is_of(stream, "datasets") and hasattr(stream, "_ex_iterable")


def _is_of(stream: Any, package: str) -> bool:
    return type(stream).__module__.startswith(f"{package}.")


def _parts_of(stream: Any) -> Iterator[Any]:
    return _parts(stream._ex_iterable) if _is_hugging_face(stream) else iter(())


def _parts(examples: Any) -> Iterator[Any]:
    """Yield this part of a Hugging Face stream, and all that it reads from."""
    yield examples
    inner = getattr(examples, "ex_iterables", None) or [getattr(examples, "ex_iterable", None)]
    yield from (part for one in inner if one is not None for part in _parts(one))


def _is_unseeded(examples: Any) -> bool:
    # Without a seed, NumPy takes 128 bits from the system. NumPy 1 also does so for each copy.
    generator = getattr(getattr(examples, "generator", None), "bit_generator", None)
    entropy = getattr(getattr(generator, "seed_seq", None), "entropy", None)
    has_seeds = int(np.__version__.partition(".")[0]) >= 2
    return has_seeds and isinstance(entropy, int) and entropy >= 2**64


def _has_state(stream: Any) -> bool:
    # Those of MosaicML and LitData take what only their own loaders know.
    with contextlib.suppress(AttributeError, TypeError):
        with contextlib.suppress(ValueError):  # a function in C may have no signature
            inspect.signature(stream.state_dict).bind()
        return hasattr(stream, "load_state_dict")
    return False


def _checksum(sample: Any) -> int:
    """Return a checksum of some values of each tensor and array, and of all plain values."""
    found: list[Any] = []
    # A sparse tensor has no flat one, and a look ends no training.
    with contextlib.suppress(Exception):
        for leaf in tree_leaves(sample):
            if isinstance(leaf, (Tensor, np.ndarray)):
                flat = leaf.reshape(-1)
                found.append(flat[:: len(flat) // 64 + 1].tolist())
            elif isinstance(leaf, (str, bytes, int, float)):
                found.append(leaf)
    return zlib.crc32(repr(found).encode())


def _packed(state: Any) -> bytes:
    content = io.BytesIO()
    torch.save(state, content)
    return content.getvalue()


def _unpacked(content: bytes) -> Any:
    try:
        return torch.load(io.BytesIO(content), weights_only=True)
    except Exception as error:
        raise UserError(
            f"state_dict() of the stream must return tensors and plain values: {error}"
        ) from error
