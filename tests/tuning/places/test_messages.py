"""Messages come over whole, however the lines are cut, and between other programs' words."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankzero.tuning.places.messages import Change, Lines, Message

CHANGES = st.builds(Change, st.text(), st.integers(0), st.binary(max_size=3000))


@contextlib.contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    """Yield the two ends of a pipe: the one to read from, and the one to write to."""
    reading, writing = os.pipe()
    with os.fdopen(reading), os.fdopen(writing, "wb"):
        yield reading, writing


def arrived(lines: Lines, count: int) -> list[Message]:
    found: list[Message] = []
    while len(found) < count:
        found += lines.receive(1.0)
    return found


@given(st.lists(CHANGES, max_size=5), st.sampled_from([b"", b"srun: job 7 queued\n", b"\n"]))
def test_messages_arrive_in_order_between_words_of_other_programs(
    sent: list[Change], words: bytes
) -> None:
    with pipe() as (reading, writing):
        lines = Lines(reading, writing)
        for one in sent:
            os.write(writing, words)
            lines.send(one)
        assert arrived(lines, len(sent)) == sent and list(lines.receive()) == []


@given(CHANGES, st.integers(1, 50))
def test_a_line_that_arrives_in_parts_is_one_message(sent: Change, part: int) -> None:
    with pipe() as (reading, writing):
        lines, found = Lines(reading, writing), list[Message]()
        lines.send(sent)
        content = os.read(reading, 1 << 16)
        for begin in range(0, len(content), max(part, len(content) // 20)):
            os.write(writing, content[begin : begin + max(part, len(content) // 20)])
            found += lines.receive()
        assert found == [sent]


@given(st.lists(st.integers(0, 3000), max_size=6), st.randoms(use_true_random=True))
def test_lines_of_two_machines_may_mix(sizes: list[int], random: Random) -> None:
    sent = [Change("x", index, bytes(size)) for index, size in enumerate(sizes)]
    written = {number: list[bytes]() for number in (0, 1)}
    for change in sent:
        with tempfile.TemporaryFile() as file:
            Lines(-1, file.fileno(), change.begin % 2).send(change)
            file.seek(0)
            written[change.begin % 2] += file.readlines()
    assert all(len(line) < 1024 for lines in written.values() for line in lines)
    with tempfile.TemporaryFile() as file:
        while left := [lines for lines in written.values() if lines]:
            file.write(random.choice(left).pop(0))
        file.seek(0)
        lines, found = Lines(file.fileno(), -1), list[Message]()
        # A file is always readable, and nothing follows its end.
        with contextlib.suppress(EOFError):
            while True:
                found += lines.receive()
    for number in (0, 1):
        own = [one for one in found if isinstance(one, Change) and one.begin % 2 == number]
        assert own == sent[number::2]


def test_a_part_of_a_message_is_none_yet() -> None:
    with pipe() as (reading, writing):
        lines, sent = Lines(reading, writing), Change("x", 0, bytes(1 << 14))
        lines.send(sent)
        content = os.read(reading, 1 << 16)
        os.write(writing, content[:1000])
        assert list(lines.receive(0.05)) == []
        timer = threading.Timer(0.2, os.write, (writing, content[1000:]))
        timer.start()
        assert lines.receive(None) == [sent]
        timer.join()


def test_long_messages_take_time_in_proportion() -> None:
    """8 MiB once took ten seconds: each part was joined with all before it."""
    with tempfile.TemporaryFile() as file:
        lines, sent = Lines(file.fileno(), file.fileno()), Change("x", 0, bytes(8 << 20))
        lines.send(sent)
        file.seek(0)
        began = time.process_time()
        assert lines.receive() == [sent] and time.process_time() - began < 3.0


def test_an_end_without_a_whole_message_is_an_error() -> None:
    reading, writing = os.pipe()
    try:
        os.write(writing, b"rankzero:half")
        os.close(writing)
        with pytest.raises(EOFError):
            Lines(reading, -1).receive(1.0)
    finally:
        os.close(reading)
