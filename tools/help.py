"""Write the help of every command, which `falcon-spec COMMAND --help` shows without loading the package.

Command: python tools/help.py (`make fix` runs it, and a test compares)
"""

from _falcon_spec import COMMANDS, HELP
from transformers_falcon_spec.cli import help_of


def main() -> None:
    """Write a file for each command, and no other."""
    HELP.mkdir(exist_ok=True)
    for path in HELP.iterdir():
        path.unlink()
    for name in COMMANDS:
        (HELP / f"{name.replace(' ', '_')}.txt").write_text(help_of(name), encoding="utf-8")


if __name__ == "__main__":
    main()
