"""`falcon-spec publish`: put a drafter on the Hub with its card, its figures and a loader, or the code that runs it.

Where this package is installed, `load_drafter(REPO, target)` and `target.generate(..., custom_generate=REPO,
trust_remote_code=True)` use it; the latter with Transformers alone, if it was published --with_code. The access token
is that of `hf auth login` or `HF_TOKEN`; there is no option for it, so that it does not get into logs.
docs/convert.md lists what is uploaded.

With --dry_run or --output FOLDER nothing is sent.

Example:
  falcon-spec publish my-drafter someone/falcon-qwen3-8b --target Qwen/Qwen3-8B --results speed.json --about about.json
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from ..errors import OptionError
from ..hub.bundle import FOLDER
from ..hub.card import About, Publication
from ..hub.publish import publish, staged
from .options import option


@dataclass(kw_only=True)
class PublishCommand:
    """The drafter to publish, and its repository."""

    drafter: str = option("Folder of the drafter.", positional=True)
    repo: str = option("OWNER/NAME on the Hub; made if it does not exist.", positional=True)
    target: str | None = option("Hub name of the target; None takes the one in the drafter's config.", None)
    results: list[str] = option("Results files of `falcon-spec bench` that measured this drafter.", [])
    about: str | None = option("JSON file with `license`, `data` (name and licence of each source) and `notes`.", None)
    with_code: bool = option("Copy the code that decodes, so that Transformers alone can use the drafter.", False)
    private: bool = option("Make the repository private, if it does not exist yet.", False)
    revision: str | None = option("A branch to commit to instead of `main`.", None)
    dry_run: bool = option("List what would be published, after all checks; nothing is sent.", False)
    output: str | None = option("Write what would be published into this folder, new or empty; nothing is sent.", None)

    def __post_init__(self) -> None:
        """Check that the folder to write is free."""
        folder = None if self.output is None else Path(self.output)
        if folder is not None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise OptionError(f"`output` must be a new or an empty folder, but `{folder}` is not. Choose another one.")


def run(command: PublishCommand) -> None:
    """Publish the drafter, and print how to use it."""
    about = About.read(Path(command.about)) if command.about else None
    publication = Publication(command.results, about, command.target, with_code=command.with_code)
    folder = Path(command.drafter)
    if command.dry_run or command.output is not None:
        with staged(folder, command.repo, publication) as files:
            _show(files, command)
        return
    commit = publish(folder, command.repo, publication, private=command.private or None, revision=command.revision)
    print(f"{command.repo} holds the drafter of {command.drafter}. Pin it:")
    print(f'  target.generate(..., custom_generate="{command.repo}", revision="{commit}", trust_remote_code=True)')


def _show(files: Path, command: PublishCommand) -> None:
    """Copy the staged files to `--output`, and list them."""
    if command.output is not None:
        shutil.copytree(files, command.output, dirs_exist_ok=True)
    code = [path for path in files.rglob("*") if path.is_file() and path.parent.name == FOLDER]
    listed = {path.name: path.stat().st_size for path in sorted(files.iterdir()) if path.is_file()}
    listed[f"{FOLDER}/, {len(code)} file{'s' * (len(code) > 1)}"] = sum(path.stat().st_size for path in code)
    for name, num_bytes in listed.items():
        print(f"{num_bytes / 1e6:12.3f} MB  {name}")
    where = f"It lies in {command.output}." if command.output is not None else "Run it again without --dry_run."
    print(f"Nothing was sent. This would be {command.repo}. {where}")
