"""Publishing a drafter on the Hub: all files are staged in one folder, then uploaded in one commit."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError, HTTPError  # type: ignore[attr-defined]  # httpx's or httpx2's

from ..convert.conversion import RECORD as CONVERSION
from ..drafters.base import DrafterModel
from ..errors import OptionError, PublishError
from .bundle import FOLDER
from .card import TRAINING, Publication
from .staging import FIGURES, check_no_tokens, copy_records, merged, stage

_REPLACED = ["*.safetensors", "*.safetensors.index.json", f"{FOLDER}/*", FIGURES, TRAINING, CONVERSION]


@contextmanager
def staged(folder: Path, repo_id: str, publication: Publication, token: str | None = None) -> Iterator[Path]:
    """Inside, a folder with all files that [`publish`] uploads, after its checks; nothing is sent."""
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
        except (HTTPError, HFValidationError, OSError, RuntimeError) as error:
            cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
            raise PublishError(
                f"The Hub must take `{repo_id}` whole, but "
                f"{' '.join(str(cause).split())[:300] or type(cause).__name__}. Nothing of it is visible there. Run "
                "the same again: what already arrived is not sent twice."
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

    `training.json` and `conversion.json` come from the folder that the drafter was loaded from.

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
    with tempfile.TemporaryDirectory() as saved:
        drafter.save_pretrained(saved, max_shard_size=max_shard_size)
        if drafter.config._name_or_path:
            copy_records(Path(drafter.config._name_or_path), Path(saved))
        return push_folder(Path(saved), repo_id, private=private, revision=revision, token=token, **published)


def push_folder(
    folder: Path,
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    token: str | None = None,
    **published: Any,
) -> str:
    """Publish the drafter in a folder; the arguments and errors are those of [`push`]."""
    unknown = sorted(set(published) - {field.name for field in fields(Publication)})
    if unknown:
        raise OptionError(f"`push_to_hub` has no option {', '.join(f'`{name}`' for name in unknown)}.")
    publication = Publication(**published)
    return publish(folder, repo_id, publication, private=private, revision=revision, token=token)
