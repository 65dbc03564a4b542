"""Who may read written files: as the umask says, whichever way a library writes them."""

import os
from pathlib import Path

_ALL_READ_AND_WRITE = 0o666


def follow_umask(path: Path) -> None:
    """Give a file, or those directly in a folder, the permissions that a plain write would have given them.

    safetensors writes to a temporary file first, which is its owner's alone, and renames that.
    """
    mask = os.umask(0)
    os.umask(mask)
    for each in path.iterdir() if path.is_dir() else [path]:
        if each.is_file() and not each.is_symlink():
            each.chmod(each.stat().st_mode | (_ALL_READ_AND_WRITE & ~mask))
