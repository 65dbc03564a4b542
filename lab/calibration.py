"""Measures how far a drafter's probabilities come true, as it is and with temperatures fitted to other prompts.

Command: python -m lab.calibration --target models/reference-target --drafter models/falcon-reference --limit 20
    --prompts benchmarks/prompts/held_out.jsonl --output benchmarks/results/calibration.json
Hardware and time: two CPU cores, about ten minutes; resumes. It observes and fits as `falcon-spec calibrate` does, and saves nothing in the
drafter. `python -m benchmarks.report` shows the errors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import logging

from lab.options import parsed
from transformers_falcon_spec.commands.calibrate import observed_texts
from transformers_falcon_spec.commands.options import CalibrateCommand
from transformers_falcon_spec.drafters.config_fields import block_temperatures
from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.evaluation.calibration import (
    TEMPERATURES,
    UNCALIBRATED,
    Fit,
    Observations,
    ObservedText,
    fit,
    nearest_index,
)
from transformers_falcon_spec.evaluation.summary import bootstrap, wilson_interval

NUM_FOLDS = 2
NUM_BINS = 15
NUM_DRAWS = 100
NUM_BEST = 8  # tokens of a list that are kept for the reliability plot


@dataclass(frozen=True)
class SeenLists(Observations):
    """Observations that hold the best tokens of each list, too, so that probabilities can be compared with what was kept."""

    best: Tensor  # [lists, NUM_BEST] scores of its best tokens, best first
    ranks: (
        Tensor  # [lists] int64, index in `best` of the token that the target chose; `best.shape[1]` if it is not there
    )
    log_norms: Tensor  # [lists, temperatures] log of the sum of exp(score / temperature)
    as_it_is: Tensor  # [lists] the temperature of a drafter that was not calibrated

    @classmethod
    def of(cls, depths: Sequence[int], scores: Tensor, chosen: Sequence[int], as_it_is: float) -> "SeenLists":
        """Observe whole lists, as `Observations.of` does."""
        seen = Observations.of(depths, scores, chosen, as_it_is)
        scores = scores.detach().float()
        best = scores.topk(min(NUM_BEST, scores.shape[-1]), dim=-1)
        is_it = best.indices == torch.tensor(chosen, device=scores.device)[:, None]
        ranks = torch.where(is_it.any(-1), is_it.int().argmax(-1), best.indices.shape[1])
        norms = torch.stack([(scores / each).logsumexp(-1) for each in (*TEMPERATURES, as_it_is)], dim=-1)
        used = torch.full((len(depths),), as_it_is)
        return cls(seen.depths, seen.losses, best.values.cpu(), ranks.cpu(), norms.cpu(), used)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "SeenLists":
        """Read what `to_json` wrote."""
        return cls(**{name: torch.tensor(each) for name, each in value.items()})

    def to_json(self) -> dict[str, Any]:
        """Lists of numbers, with five digits after the point."""
        rounded = {name: value.double().round(decimals=5).tolist() for name, value in vars(self).items()}
        return rounded | {"depths": self.depths.tolist(), "ranks": self.ranks.tolist()}

    def best_probs(self, indices: Tensor) -> Tensor:
        """Probabilities `[lists, NUM_BEST]` of the best tokens, at the temperature index `[lists]` of each list."""
        common = torch.tensor(TEMPERATURES).expand(len(self.depths), -1)
        temperatures = torch.cat([common, self.as_it_is[:, None]], dim=1).gather(1, indices[:, None])
        return (self.best / temperatures - self.log_norms.gather(1, indices[:, None])).exp().clamp(max=1)

    @property
    def is_kept(self) -> Tensor:
        """Which of the best tokens the target chose, `[lists, NUM_BEST]`."""
        return self.ranks[:, None] == torch.arange(self.best.shape[1])


def reliability(probs: Tensor, is_kept: Tensor) -> list[dict[str, Any]]:
    """The bins of a reliability plot, of equal size: mean probability, accepted share with its interval, and size."""
    order = probs.argsort(stable=True)
    prob_bins = probs[order].double().chunk(NUM_BINS)
    kept_bins = is_kept[order].double().chunk(NUM_BINS)

    rows = []
    for prob, kept in zip(prob_bins, kept_bins, strict=True):
        num_kept, num = int(kept.sum()), len(kept)
        rows.append(
            {
                "probability": float(prob.mean()),
                "share": num_kept / num,
                "interval": wilson_interval(num_kept, num),
                "num_nodes": num,
            }
        )

    return rows


def expected_calibration_error(bins: Sequence[dict[str, Any]]) -> float:
    """Mean distance of probabilities from the accepted share.

    Example:

    ```python
    >>> expected_calibration_error(reliability(torch.full((100,), 0.5), torch.arange(100) % 4 == 0))
    0.25

    ```
    """
    distance = 0.0
    num_nodes = 0
    for each in bins:
        distance += each["num_nodes"] * abs(each["probability"] - each["share"])
        num_nodes += each["num_nodes"]

    return distance / num_nodes


def error_by_luck(probs: Tensor, seed: int) -> float:
    """The calibration error that is left on average if every node is accepted with exactly its probability."""
    generator, total = torch.Generator().manual_seed(seed), 0.0
    for prob in probs.sort().values.double().chunk(NUM_BINS):
        draws = torch.rand(NUM_DRAWS, len(prob), generator=generator, dtype=torch.float)
        total += float(((draws < prob).double().sum(dim=1) - prob.sum()).abs().mean())

    return total / len(probs)


def fits_of_folds(texts: Sequence[ObservedText], block_size: int) -> list[Fit]:
    """Fit the temperatures once for each fold of the prompts, to the prompts of all other folds."""
    folds = fold_of(texts)
    fits = []
    for fold in range(NUM_FOLDS):
        others = [text for text in texts if folds[text.prompt] != fold]
        fits.append(fit(others, block_size))

    return fits


def fold_of(texts: Sequence[ObservedText]) -> dict[str, int]:
    """The fold of each prompt, in turn."""
    prompts = sorted({text.prompt for text in texts})
    return {prompt: number % NUM_FOLDS for number, prompt in enumerate(prompts)}


def compare(texts: Sequence[ObservedText], fits: Sequence[Fit], block_size: int, seed: int) -> list[dict[str, Any]]:
    """One row for each decoding: errors of the drafter as it is, and with temperatures fitted to other prompts."""
    folds = fold_of(texts)
    by_decoding: dict[str, list[ObservedText]] = {}
    for text in texts:
        by_decoding.setdefault(text.decoding, []).append(text)

    rows = []
    for decoding, chosen in by_decoding.items():
        before, after, losses = [], [], []
        num_lists = 0
        for text in chosen:
            depths = text.seen.depths
            uncalibrated = torch.full_like(depths, UNCALIBRATED)
            fitted = fitted_indices(fits[folds[text.prompt]], text, block_size)
            before.append((text, uncalibrated))
            after.append((text, fitted))
            losses.append((_loss(text, uncalibrated), _loss(text, fitted), len(depths)))
            num_lists += len(depths)

        rows.append(
            {
                "decoding": decoding,
                "num_texts": len(chosen),
                "num_lists": num_lists,
                "before": _figures(before, seed),
                "after": _figures(after, seed),
                "loss_saved": loss_saved(losses),
                "loss_saved_interval": bootstrap(losses, loss_saved, seed),
            }
        )

    return rows


def fitted_indices(fitted: Fit, text: ObservedText, block_size: int) -> Tensor:
    """The index in `TEMPERATURES` of the fitted temperature of each list of a text."""
    by_position = list(map(nearest_index, block_temperatures(fitted, block_size, text.temperature)))
    return torch.tensor(by_position)[(text.seen.depths - 1) % block_size]


def loss_saved(texts: Sequence[tuple[float, float, int]]) -> float:
    """The mean decrease of a list's loss; of each text come the summed loss before and after, and its lists."""
    before, after, num_lists = map(sum, zip(*texts, strict=True))
    return float((before - after) / num_lists)


def _loss(text: ObservedText, indices: Tensor) -> float:
    """The summed loss of a text's lists, each at the temperature of its index."""
    return float(text.seen.losses.gather(1, indices[:, None]).double().sum())


def _figures(texts: Sequence[tuple[ObservedText, Tensor]], seed: int) -> dict[str, Any]:
    """Loss of the chosen tokens; error, error by luck and bins, of all nodes and of the best node of each list."""
    num_lists = sum(len(indices) for _, indices in texts)
    found: dict[str, Any] = {"loss": sum(_loss(*each) for each in texts) / num_lists}
    for name, width in (("all_nodes", None), ("best_nodes", 1)):
        probs = torch.cat([text.seen.best_probs(indices)[:, :width].flatten() for text, indices in texts])
        is_kept = torch.cat([text.seen.is_kept[:, :width].flatten() for text, _ in texts])
        bins = reliability(probs, is_kept)
        error, by_luck = expected_calibration_error(bins), error_by_luck(probs, seed)
        found[name] = {"error": error, "error_by_luck": by_luck, "bins": bins}

    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Observe drafts, fit to all prompts and to each part of them, and write the errors before and after."""
    command = parsed(CalibrateCommand, __doc__, argv)
    if command.save:
        raise OptionError("This measures, and changes no drafter. Leave `--save` to `falcon-spec calibrate`.")

    logging.set_verbosity_error()
    target, drafter, texts = observed_texts(command, SeenLists)
    size = drafter.block_size
    folds = fits_of_folds(texts, size)
    result = {
        "provenance": command.origin(target),
        "fit": fit(texts, size),
        "fits_of_folds": folds,
        "rows": compare(texts, folds, size, command.seed),
    }
    command.write(result)
    print(f"{command.output} holds the errors before and after.")


if __name__ == "__main__":
    main()
