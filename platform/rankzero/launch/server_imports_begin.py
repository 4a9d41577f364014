"""Imported first by the server that workers are forked from.

The server itself sees the end of its command only once it has imported everything. On a busy
machine that is more than half a minute later.
"""

import gc
import os

from rankzero.launch import parent_death
from rankzero.launch.process_name import set_process_name

set_process_name("forkserver")
gc.disable()  # see `fork_server`
command = os.environ.pop(parent_death.COMMAND, None)
parent_death.end_with_parent(None if command is None else int(command))
