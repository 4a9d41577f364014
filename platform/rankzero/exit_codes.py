"""What a command's end means to whoever called it. Pure."""

FINISHED, FAILED, USAGE, RESUMABLE = 0, 1, 2, 75  # 75 is sysexits' EX_TEMPFAIL: stopped, try again
