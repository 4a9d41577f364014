"""Imported last by the server that workers are forked from.

From now on the server outlives its command, until the last worker has ended: a rank whose launcher
was killed saves a checkpoint.
"""

import atexit
import gc

from rankzero.launch.parent_death import outlive_parent

gc.freeze()
# A preloaded module may import triton, which prints frozen objects as leaks at its end.
atexit.register(gc.unfreeze)
gc.enable()
outlive_parent()
