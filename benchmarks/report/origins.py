"""Refuses tables of results that do not belong together: of several commits, or of several drafters under one name."""

from collections.abc import Mapping

from transformers_falcon_spec.errors import OptionError

from . import Result


def check_one_commit(result: Result, file: str) -> None:
    """Refuse a results file whose runs or cases were made by different commits.

    Files of earlier versions, whose runs do not name their commit, pass.

    Raises:
        [`OptionError`]: there are several.
    """
    cases = result.get("cases", [])
    found = {case["provenance"]["commit"] for case in cases if "provenance" in case}
    found |= {commit for method in result.get("methods", []) for commit in method.get("commits", [])}
    if len(found) > 1:
        raise OptionError(
            f"All runs of a table must be of one commit, but those of `{file}` are of {sorted(found)}. Delete "
            f"`{file.removesuffix('.json')}.jsonl`, and measure all of them again."
        )


def check_one_drafter(results: Mapping[str, Result]) -> None:
    """Refuse results files of one table that hold different weights under the same name of a drafter.

    Args:
        results (`dict`): Results by the names of their files.

    Raises:
        [`OptionError`]: a method has several fingerprints.
    """
    known: dict[str, tuple[str, str]] = {}
    for file, result in results.items():
        for name, weights in _drafters(result):
            other, first = known.setdefault(name, (weights, file))
            if other != weights:
                raise OptionError(
                    f"One table must hold one drafter `{name}`, but its weights are {other} in `{first}` and {weights} in "
                    f"`{file}`. Measure the older one again."
                )


def _drafters(result: Result) -> list[tuple[str, str]]:
    """Name and fingerprint of each drafter; in another type, or on another target, it is another one."""
    origin = result["provenance"]
    found = [
        (f"{each['method']} on {each.get('target')}", each["weights"])
        for each in result.get("methods", [])
        if each.get("weights")
    ]
    if origin.get("drafter_weights"):
        found.append((origin["drafter"], origin["drafter_weights"]))
    dtype = origin.get("dtype")
    named = ", ".join(dict.fromkeys(dtype.values())) if isinstance(dtype, dict) else dtype
    return [(f"{name} in {named}", weights) for name, weights in found]
