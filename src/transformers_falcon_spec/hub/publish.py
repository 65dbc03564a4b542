"""Publishing a drafter on the Hub: all of its files are staged in one folder, then uploaded in one commit.

Staged are weights, config, options, provenance, card and figures. Only files with known names are published, and
neither pickles nor files that hold an access token.
"""

import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, get_token, hf_hub_download
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError is httpx's or httpx2's
    HFValidationError,
    HTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from ..convert.conversion import RECORD as CONVERSION
from ..convert.vocabulary import read_object
from ..core.options import check_known
from ..drafters.base import DrafterModel
from ..drafters.checkpoint import base_of_adapter, read_options
from ..drafters.config_fields import update_config
from ..drafters.fingerprint import FIELD
from ..drafters.registry import class_of
from ..errors import CheckpointError, PublishError, short
from ..evaluation.doctor import training_record
from ..provenance import portable
from .card import (
    TRAINING,
    Publication,
    check_target_name,
    read_figures,
    render_card,
)

_RECORDS = (TRAINING, CONVERSION)  # of where a drafter came from
_COPIED = ("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json")
_REPLACED = ["*.safetensors", "*.safetensors.index.json", *_RECORDS]
_TOKENS = (
    re.compile(r"\bhf_[A-Za-z0-9]{30,}"),
    re.compile(r"\bapi_org_[A-Za-z0-9]{30,}"),
    re.compile(r"://[^/\s:@]+:[^/\s@]+@"),
)


@contextmanager
def staged(folder: Path, repo_id: str, publication: Publication, token: str | None = None) -> Iterator[Path]:
    """Inside, a folder with all files that [`publish`] uploads, after its checks; nothing is sent."""
    check_repo(repo_id)
    if not folder.is_dir():
        raise CheckpointError(
            f"What is published must be the folder of a drafter, but `{folder}` is none. Check the path."
        )

    with tempfile.TemporaryDirectory() as into, merged(folder) as whole:
        stage(whole, repo_id, Path(into), publication)
        check_no_tokens(Path(into), token)
        yield Path(into)


def publish(
    folder: Path,
    repo_id: str,
    publication: Publication,
    *,
    private: bool | None = None,
    revision: str | None = None,
    token: str | None = None,
) -> str:
    """Publish the drafter in a folder; returns the id of the commit, by which users can pin it with `revision=`.

    The other arguments are those of `push`.

    Raises:
        [`CheckpointError`]: `folder` holds no complete drafter, or its weights are pickles.
        [`PublishError`]: something must not be published, or the upload broke off or was refused.
    """
    with staged(folder, repo_id, publication, token) as files:
        api = HfApi(token=token, library_name=__package__.partition(".")[0])
        try:
            api.create_repo(repo_id, private=private, exist_ok=True)
            if revision is not None:
                api.create_branch(repo_id, branch=revision, exist_ok=True)

            commit = api.upload_folder(
                repo_id=repo_id,
                folder_path=files,
                revision=revision,
                commit_message=f"Publish {repo_id.rpartition('/')[2]}",
                delete_patterns=_REPLACED,
            )
        except (HTTPError, OSError, RuntimeError) as error:
            cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
            raise PublishError(
                f"The Hub must take `{repo_id}` whole, but {short(cause)}. Nothing of it is visible there. Run the "
                "same again: what already arrived is not sent twice."
            ) from error

    return str(commit.oid)


def push(
    drafter: DrafterModel,
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    token: str | None = None,
    max_shard_size: int | str = "5GB",
    **published: Any,
) -> str:
    """Publish a drafter in its present state, as `drafter.push_to_hub` does; returns the id of the commit.

    `training.json` and `conversion.json` come from where the drafter was loaded from, a folder or the Hub.

    Args:
        drafter (`DrafterModel`): The drafter.
        repo_id (`str`): `OWNER/NAME`; it is made if it does not exist.
        private (`bool`, *optional*): Whether a new repository is private.
        revision (`str`, *optional*): A branch to commit to, made if it does not exist.
        token (`str`, *optional*): An access token; None takes that of `hf auth login`.
        max_shard_size (`int` or `str`, *optional*): As in `save_pretrained`.
        **published: Fields of [`Publication`].

    Raises:
        [`OptionError`]: an option is unknown.
        [`PublishError`]: something must not be published, or the upload broke off or was refused.
    """
    check_known("push_to_hub", published, Publication.__dataclass_fields__)
    publication = Publication(**published)
    with tempfile.TemporaryDirectory() as saved:
        drafter.save_pretrained(saved, max_shard_size=max_shard_size)
        if drafter.config._name_or_path:
            commit = getattr(drafter.config, "_commit_hash", None)  # as it was loaded; a folder has none
            copy_records(drafter.config._name_or_path, Path(saved), revision=commit, token=token)

        return publish(Path(saved), repo_id, publication, private=private, revision=revision, token=token)


def stage(folder: Path, repo_id: str, into: Path, publication: Publication) -> None:
    """Write the publication of the drafter in `folder` into the empty folder `into`.

    Raises:
        [`CheckpointError`]: `folder` holds no complete drafter, or its weights are pickles.
        [`PublishError`]: the target has no name on the Hub, or results belong to another drafter.
    """
    drafter = load_drafter(folder)
    target = check_target_name(publication.target or drafter.config.target_name_or_path)
    figures = read_figures(publication.results, drafter)

    for pattern in _COPIED:
        for path in folder.glob(pattern):
            shutil.copyfile(path, into / path.name)

    records = {}
    for name in _RECORDS:
        if (folder / name).is_file():
            records[name] = portable(read_object(folder / name))
            (into / name).write_text(json.dumps(records[name], indent=1) + "\n", encoding="utf-8")

    update_config(into, target_name_or_path=target)

    card = render_card(drafter, repo_id, target, figures, records, publication)
    (into / "README.md").write_text(card, encoding="utf-8")


@contextmanager
def merged(folder: Path) -> Iterator[Path]:
    """The folder of a drafter; of an adapter a temporary one, of its drafter with the adapter merged into it."""
    base = base_of_adapter(folder)
    if base is None:
        yield folder
        return

    drafter = class_of(base).from_pretrained(base)
    peft = import_module("peft")
    whole: Any = peft.PeftModel.from_pretrained(drafter, str(folder)).merge_and_unload()
    whole.generation_config = read_options(folder) or whole.generation_config
    setattr(whole.config, FIELD, None)  # it was made for the target of the drafter beneath
    whole.config.target_name_or_path = training_record(str(folder)).get("target")

    with tempfile.TemporaryDirectory() as into:
        whole.save_pretrained(into)
        copy_records(str(folder), Path(into), (TRAINING,))
        copy_records(base, Path(into), (CONVERSION,))
        yield Path(into)


def copy_records(name: str, into: Path, names: Sequence[str] = _RECORDS, **hub: Any) -> None:
    """Copy the records of where a drafter came from that lie beside its weights, in a folder or on the Hub.

    Raises:
        [`PublishError`]: the Hub does not say whether it has one.
    """
    for record in names:
        found = Path(name, record)
        if not found.parent.is_dir():
            try:
                found = Path(hf_hub_download(name, record, **hub))
            except (RemoteEntryNotFoundError, RepositoryNotFoundError, HFValidationError):  # none, or a folder once
                continue
            except (HTTPError, OSError) as error:
                raise PublishError(
                    f"`{record}` of `{name}` must be read from the Hub, to be published again, but {short(error)}. "
                    "Run the same again."
                ) from error

        if found.is_file():
            shutil.copyfile(found, into / record)


def load_drafter(folder: Path) -> DrafterModel:
    """Load the drafter in a folder as its users will load it."""
    drafter = class_of(folder).from_pretrained(folder)
    if drafter.num_parameters() and not list(folder.glob("*.safetensors")):
        raise CheckpointError(
            f"The weights in `{folder}` must be safetensors: others can run code where they are read. Save the "
            "drafter again with `save_pretrained`."
        )

    return drafter


def check_repo(repo_id: str) -> None:
    """Refuse what cannot be the name of a repository: [`PublishError`]."""
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise PublishError(f"A drafter is published as `OWNER/NAME`, but {error} Choose another name.") from error


def check_no_tokens(folder: Path, token: str | None = None) -> None:
    """Refuse files that hold `token`, the token of `hf auth login`, or anything that looks like an access token.

    Raises:
        [`PublishError`]: a file holds a token; the message names the file, but not the token.
    """
    in_use = {each for each in (token, get_token()) if each}
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or path.suffix == ".safetensors":
            continue

        text = path.read_text(encoding="utf-8")
        if any(each in text for each in in_use) or any(pattern.search(text) for pattern in _TOKENS):
            raise PublishError(
                f"What is published must hold no access token, but `{path.relative_to(folder)}` would hold one. Take "
                "it out of the file that it came from, and revoke it: whoever could read that file has it."
            )
