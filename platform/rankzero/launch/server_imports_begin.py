"""Imported first by the server that workers are forked from.

The server itself sees the end of its command only once it has imported everything. On a busy
machine that is more than half a minute later.
"""

from rankzero.launch.parent_death import end_with_parent

end_with_parent()
