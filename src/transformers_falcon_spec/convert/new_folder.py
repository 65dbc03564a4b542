"""Writing a folder as a whole: until all of its files are there, nothing stands under its name."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import OptionError


def check_is_new(dest: Path) -> None:
    """Refuse a destination that holds something already: [`OptionError`]."""
    if dest.exists() and (not dest.is_dir() or any(dest.iterdir())):
        raise OptionError(f"`DEST` must be a new or an empty folder, but `{dest}` is not. Choose another one.")


@contextmanager
def new_folder(dest: Path) -> Iterator[Path]:
    """Inside, files are written to the folder that is given; it becomes `dest` at the end, unless anything fails."""
    dest.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{dest.name}-", dir=dest.parent))
    try:
        yield unfinished
        unfinished.chmod(0o755)  # a temporary folder is its owner's alone
        if dest.exists():
            dest.rmdir()  # empty
        unfinished.rename(dest)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
