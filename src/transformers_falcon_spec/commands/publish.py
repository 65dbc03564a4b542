"""`falcon-spec publish`: put a drafter on the Hub with its recipe, its card and its figures.

Whoever has Transformers alone can then write with it: `target.generate(..., custom_generate=REPO, trust_remote_code=True)`. The access token is
that of `hf auth login` or `HF_TOKEN`; it is no option, so that it stays out of logs. docs/publish.md says what is sent.

Example:
  falcon-spec publish my-drafter someone/falcon-qwen3-8b --target Qwen/Qwen3-8B --results speed.json --about about.json
"""

from dataclasses import dataclass, field
from pathlib import Path

from ..hub.card import About
from ..hub.publish import publish
from ..hub.staging import Publication


@dataclass
class PublishCommand:
    """What to publish, and where."""

    drafter: str = field(metadata={"positional": True, "help": "Folder of the drafter."})
    repo: str = field(metadata={"positional": True, "help": "OWNER/NAME on the Hub; made if it does not exist."})
    target: str | None = field(
        default=None, metadata={"help": "Hub name of the target; None takes the one in the drafter's config."}
    )
    results: list[str] = field(
        default_factory=list, metadata={"help": "Results files of `falcon-spec bench` that measured this drafter."}
    )
    about: str | None = field(
        default=None,
        metadata={"help": "JSON file with `license`, `data` (name and licence of each source) and `notes`."},
    )
    private: bool = field(default=False, metadata={"help": "Make the repository private, if it does not exist yet."})
    revision: str | None = field(default=None, metadata={"help": "A branch to commit to instead of `main`."})


def run(command: PublishCommand) -> None:
    """Publish."""
    about = About.read(Path(command.about)) if command.about else None
    publication = Publication(command.results, about, command.target)
    folder = Path(command.drafter)
    commit = publish(folder, command.repo, publication, private=command.private or None, revision=command.revision)
    print(f"{command.repo} holds the drafter of {command.drafter}. Pin it:")
    print(f'  target.generate(..., custom_generate="{command.repo}", revision="{commit}", trust_remote_code=True)')
