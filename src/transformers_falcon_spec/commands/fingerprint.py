"""`falcon-spec fingerprint`: record in a drafter's config which target it was trained for."""

from pathlib import Path

from transformers import logging

from ..drafters.fingerprint import FIELD, TargetFingerprint
from ..errors import OptionError
from ..provenance import portable
from .loading import load_drafter, save_fields
from .options import FingerprintCommand


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
