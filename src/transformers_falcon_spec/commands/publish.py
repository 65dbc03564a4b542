"""`falcon-spec publish`: put a drafter on the Hub with its card, its figures and the code that runs it.

It can then be used with Transformers alone: `target.generate(..., custom_generate=REPO, trust_remote_code=True)`. The
access token is that of `hf auth login` or `HF_TOKEN`; there is no option for it, so that it does not get into logs.
docs/publish.md lists what is uploaded.

Example:
  falcon-spec publish my-drafter someone/falcon-qwen3-8b --target Qwen/Qwen3-8B --results speed.json --about about.json
"""

from dataclasses import dataclass
from pathlib import Path

from ..hub.card import About
from ..hub.publish import publish
from ..hub.staging import Publication
from .options import option


@dataclass(kw_only=True)
class PublishCommand:
    """The drafter to publish, and its repository."""

    drafter: str = option("Folder of the drafter.", positional=True)
    repo: str = option("OWNER/NAME on the Hub; made if it does not exist.", positional=True)
    target: str | None = option("Hub name of the target; None takes the one in the drafter's config.", None)
    results: list[str] = option("Results files of `falcon-spec bench` that measured this drafter.", [])
    about: str | None = option("JSON file with `license`, `data` (name and licence of each source) and `notes`.", None)
    private: bool = option("Make the repository private, if it does not exist yet.", False)
    revision: str | None = option("A branch to commit to instead of `main`.", None)


def run(command: PublishCommand) -> None:
    """Publish the drafter, and print how to use it."""
    about = About.read(Path(command.about)) if command.about else None
    publication = Publication(command.results, about, command.target)
    folder = Path(command.drafter)
    commit = publish(folder, command.repo, publication, private=command.private or None, revision=command.revision)
    print(f"{command.repo} holds the drafter of {command.drafter}. Pin it:")
    print(f'  target.generate(..., custom_generate="{command.repo}", revision="{commit}", trust_remote_code=True)')
