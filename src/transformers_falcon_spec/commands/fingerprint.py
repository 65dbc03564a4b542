"""`falcon-spec fingerprint`: record in a drafter's config which target it was trained for, so that others are noticed.

The record is a fingerprint of the target. Training writes it by itself; this command is for drafters that were
converted or are older. That `--target` is the right one is not checked beyond its sizes. Only `config.json` in the
drafter's folder changes.

Example:
  falcon-spec fingerprint --target models/reference-target --drafter models/falcon-reference
"""

from dataclasses import dataclass
from pathlib import Path

from transformers import logging

from ..drafters.fingerprint import FIELD, TargetFingerprint
from ..errors import OptionError
from ..provenance import portable
from .loading import load_drafter, save_fields
from .options import DTYPE_HELP, PairOptions, option


@dataclass(kw_only=True)
class FingerprintCommand(PairOptions):
    """The drafter, and the target that it was trained for."""

    dtype: str = option(f"The type of the target in training: {DTYPE_HELP}", "auto")


def run(command: FingerprintCommand) -> None:
    """Check the sizes, record the fingerprint of the target, and print what was recorded."""
    logging.set_verbosity_error()
    command.check_folder()
    target, tokenizer = command.load_target()
    drafter = load_drafter(command.drafter, target)
    if not hasattr(drafter.config, FIELD):
        raise OptionError(
            f"A fingerprint is for drafters that learned from one target, but a `{type(drafter).__name__}` works with "
            "any. It needs none."
        )
    setattr(drafter.config, FIELD, None)  # an old fingerprint must not be compared
    drafter.check_target(target)
    fingerprint = TargetFingerprint.of_target(target, tokenizer)
    save_fields(Path(command.drafter), {FIELD: fingerprint.to_json(), "target_name_or_path": portable(command.target)})
    parts = ", ".join(fingerprint.weights) or "none"
    print(f"`{command.drafter}` is for `{command.target}` in {fingerprint.dtype}; weights known: {parts}.")
    for part, reason in fingerprint.skipped.items():
        print(f"{part}: not looked at, {reason}.")
