"""Imported last by the server that workers are forked from.

From now on the server outlives its command, until the last worker has ended: a rank whose launcher
was killed saves a checkpoint.
"""

import gc

from rankzero.launch.parent_death import outlive_parent

gc.freeze()
gc.enable()
outlive_parent()
