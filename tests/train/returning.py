"""A worker that has returned, for a process that can import no test."""

from multiprocessing.synchronize import Event

from rankzero.train.launch import enter


def returned(event: Event, told: Event) -> None:
    """Do what torchrun's agent has a worker do once it has returned."""
    enter(lambda request: "FINISHED", None)
    told.set()
    event.wait()
