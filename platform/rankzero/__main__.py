"""``python -m rankzero`` is the command ``rankzero``."""

from rankzero.cli.main import command

if __name__ == "__main__":
    command()
