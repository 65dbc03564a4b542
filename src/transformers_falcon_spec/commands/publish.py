"""`falcon-spec publish`: put a drafter on the Hub with its card and its figures."""

import shutil
from pathlib import Path

from ..convert.conversion import check_is_new, new_folder
from ..hub.card import About, Publication
from ..hub.publish import publish, staged
from .options import PublishCommand


def run(command: PublishCommand) -> None:
    """Publish the drafter, and print how to use it."""
    about = About.read(Path(command.about)) if command.about else None
    publication = Publication(command.results, about, command.target)
    folder = Path(command.drafter)
    if command.output is not None:
        check_is_new(Path(command.output), "--output")
    if command.dry_run or command.output is not None:
        with staged(folder, command.repo, publication) as files:
            _show(files, command)

        return

    commit = publish(folder, command.repo, publication, private=command.private or None, revision=command.revision)
    print(f"{command.repo} holds the drafter of {command.drafter}. Pin it:")
    print(f'  load_drafter("{command.repo}", target, revision="{commit}")')


def _show(files: Path, command: PublishCommand) -> None:
    """Copy the staged files to `--output`, and list them."""
    if command.output is not None:
        with new_folder(Path(command.output)) as folder:
            shutil.copytree(files, folder, dirs_exist_ok=True)

    for path in sorted(files.iterdir()):
        print(f"{path.stat().st_size / 1e6:12.3f} MB  {path.name}")

    where = f"It lies in {command.output}." if command.output is not None else "Run it again without --dry_run."
    print(f"Nothing was sent. This would be {command.repo}. {where}")
