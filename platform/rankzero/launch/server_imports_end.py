"""Imported last by the server that workers are forked from.

From now on the server outlives its command, until the last worker has ended: a rank whose launcher
was killed saves a checkpoint.
"""

from rankzero.launch.parent_death import outlive_parent

outlive_parent()
