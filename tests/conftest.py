"""Settings of all tests."""

import signal

from hypothesis import settings

pytest_plugins = ["support.commands", "support.stores", "support.training"]

settings.register_profile("patient", deadline=None)  # a busy machine is no failure
settings.load_profile("patient")

if (
    signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
):  # as under nohup: commands would take it for their users' wish
    signal.signal(signal.SIGHUP, lambda *_: None)
