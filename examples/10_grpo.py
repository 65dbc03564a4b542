"""Reinforcement learning with TRL's GRPOTrainer, whose rollouts a drafter helps to write, and which distils the drafter on the way.

Needs the extra `rollouts`. Command: python examples/10_grpo.py
Hardware and time: two CPU cores, some minutes with the models in `models/`. Each rollout is drawn from a seed of its own, and is the text that the
target alone draws from it: all are checked, and an error is raised where one is not. A callback trains the drafter on the features that the trainer's
own forwards make, so that it follows the target. Seconds are those of the processor, which a busy machine hardly changes. `--frozen` leaves the drafter
as it is; `--output` writes a results file, which `python -m benchmarks.report` renders into docs/results.md.
"""

import argparse
import functools
import itertools
import json
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from datasets import Dataset
from pair import pair_options, read_pair
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from transformers_falcon_spec import DrafterTrainingArguments, GenerationStats, collect_speculation
from transformers_falcon_spec.generation.model_parts import decoder_of
from transformers_falcon_spec.generation.sequence_batch import seeded_rows
from transformers_falcon_spec.provenance import provenance
from transformers_falcon_spec.training.objectives import objective_of

QUESTIONS = Path(__file__).parents[1] / "benchmarks" / "prompts" / "gsm8k.jsonl"


class DraftedGRPOTrainer(GRPOTrainer):
    """TRL's trainer, whose rollouts are drafted; each row is drawn from a seed of its own.

    TRL hands no assistant to `generate`, so it is bound to the target for the time of a call.
    """

    def __init__(self, *args: Any, drafter: PreTrainedModel, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.drafter = drafter
        self.rollouts: list[dict[str, Any]] = []  # what each call of `generate` took
        self._row_seeds = itertools.count(1_000_000 * self.args.seed)

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        target = self.accelerator.unwrap_model(self.model)
        seeds = list(itertools.islice(self._row_seeds, len(prompt_ids)))

        with torch.random.fork_rng():
            start = time.process_time()
            plain, _ = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            plain_seconds = time.process_time() - start

        target.generate = functools.partial(target.generate, assistant_model=self.drafter)
        try:
            with seeded_rows(seeds), collect_speculation() as calls:
                start = time.process_time()
                found = super()._generate_single_turn(prompt_ids, *args, **kwargs)
                seconds = time.process_time() - start
        finally:
            del target.generate

        stats = sum(calls, GenerationStats())
        self.rollouts.append(
            {
                "step": self.state.global_step,
                "num_identical": sum(map(self._is_targets_own, prompt_ids, found[0], seeds)),
                "num_rows": len(seeds),
                "num_tokens": sum(map(len, found[0])),
                "num_steps": stats.num_steps,
                "num_accepted": stats.num_accepted,
                "seconds": seconds,
                "num_plain_tokens": sum(map(len, plain)),
                "plain_seconds": plain_seconds,
            }
        )
        return found

    def _is_targets_own(self, prompt_ids: list[int], completion_ids: list[int], seed: int) -> bool:
        """Whether the target alone draws the same text from the seed."""
        target = self.accelerator.unwrap_model(self.model)
        ids = torch.tensor([prompt_ids], device=target.device)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            text = target.generate(ids, attention_mask=torch.ones_like(ids), generation_config=self.generation_config)
        return text[0, len(prompt_ids) :].tolist() == completion_ids


class DistilDrafter(TrainerCallback):
    """Trains the drafter after each step of the target, on the features of the forwards that this step made.

    Args:
        drafter (`PreTrainedModel`): The drafter.
        target (`PreTrainedModel`): The target, which the trainer trains.
        learning_rate (`float`): Of the drafter.
    """

    def __init__(self, drafter: PreTrainedModel, target: PreTrainedModel, learning_rate: float) -> None:
        needs_grad = [weight.requires_grad for weight in target.parameters()]
        kind = objective_of(drafter)
        features = kind.read_target(drafter, target)  # which freezes a target, but this one goes on learning
        for weight, needs in zip(target.parameters(), needs_grad, strict=True):
            weight.requires_grad_(needs)

        self.objective = kind(drafter, features, DrafterTrainingArguments())
        self.drafter = drafter
        self.weights = [weight for weight in drafter.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(self.weights, learning_rate)
        self.losses: list[float] = []  # of each step
        self._call: dict[str, Tensor] = {}
        self._read: list[dict[str, Tensor]] = []
        target.register_forward_pre_hook(self._note_call, with_kwargs=True)
        decoder_of(target).register_forward_hook(self._note_features)

    def _note_call(self, _target: Any, _args: Any, call: dict[str, Any]) -> None:
        self._call = call

    def _note_features(self, _decoder: Any, _args: Any, outputs: Any) -> None:
        if not torch.is_grad_enabled() or self._call.get("labels") is None:  # rollouts, and what is only looked at
            return
        rows: dict[str, list[Tensor]] = {"input_ids": [], "attention_mask": [], "assistant_mask": [], "features": []}
        for ids, mask, labels, states in zip(
            self._call["input_ids"], self._call["attention_mask"], self._call["labels"], outputs[0], strict=True
        ):
            is_text = mask.bool()  # prompts are padded on the left
            rows["input_ids"].append(ids[is_text])
            rows["attention_mask"].append(mask[is_text])
            rows["assistant_mask"].append(labels[is_text] >= 0)
            rows["features"].append(states[is_text].detach())
        self._read.append({name: pad_sequence(parts, batch_first=True) for name, parts in rows.items()})

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002  callbacks get them
        """One step of the drafter."""
        generator = torch.Generator().manual_seed(state.global_step)
        losses = []
        self.drafter.train()
        for batch in self._read:
            pairs = self.objective.features(batch)
            loss = self.objective(self.drafter, pairs, generator, state.global_step / state.max_steps).loss
            gradients = torch.autograd.grad(loss, self.weights, allow_unused=True)  # of the drafter alone
            for weight, gradient in zip(self.weights, gradients, strict=True):
                weight.grad = gradient
            torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
            self.optimizer.step()
            losses.append(loss.item())
        self.drafter.eval()
        self.losses.append(fmean(losses))
        self._read = []


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The share of different tokens in an answer: the less it repeats itself, the better."""
    return [len(set(ids)) / len(ids) for ids in completion_ids]


def prompts(num: int, is_tiny: bool) -> Dataset:
    """Questions as conversations."""
    if is_tiny:
        texts = ["2 + 3?"] * num
    else:
        texts = [json.loads(line)["prompt"] for line in QUESTIONS.read_text("utf-8").splitlines()[:num]]
    return Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in texts])


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = pair_options(__doc__)
    options.add_argument("--steps", type=int, default=12)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--max-new-tokens", type=int, default=32)
    options.add_argument("--learning-rate", type=float, default=1e-4, help="of the target")
    options.add_argument("--drafter-learning-rate", type=float, default=1e-4)
    options.add_argument("--frozen", action="store_true", help="do not distil the drafter")
    options.add_argument("--output", type=Path, help="results file; none is written without it")
    return options


def main() -> None:
    """Train, and print what the drafter did for the rollouts."""
    args = parser().parse_args()
    settings = {name.replace("-", "_"): value for name, value in vars(args).items() if name != "output"}
    origin = provenance(**settings)
    pair = read_pair(args)
    pair.drafter.generation_config.tune = False  # what is drafted depends on no clock
    config = GRPOConfig(
        output_dir="runs/grpo",
        seed=args.seed,
        max_steps=2 if args.tiny else args.steps,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=8 if args.tiny else args.max_new_tokens,
        learning_rate=args.learning_rate,
        gradient_checkpointing=False,  # a target that recomputes its activations keeps no cache
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        use_cpu=args.device == "cpu",
        bf16=False,
    )
    distilling = None if args.frozen else DistilDrafter(pair.drafter, pair.target, args.drafter_learning_rate)
    trainer = DraftedGRPOTrainer(
        pair.target,
        reward_funcs=reward,
        args=config,
        train_dataset=prompts(2 * config.max_steps, args.tiny),
        processing_class=pair.tokenizer,
        callbacks=[] if distilling is None else [distilling],
        drafter=pair.drafter,
    )
    trainer.train()

    rows = trainer.rollouts
    for row, logged in zip(rows, trainer.state.log_history, strict=False):
        row["reward"] = logged["reward"]
        row["drafter_loss"] = None if distilling is None else distilling.losses[row["step"]]
        print(
            f"step {row['step']}: reward {row['reward']:.2f}, {1 + row['num_accepted'] / max(row['num_steps'], 1):.2f} "
            f"tokens a step, {row['num_tokens'] / row['seconds']:.0f} tokens per second of the processor, "
            f"{row['num_plain_tokens'] / row['plain_seconds']:.0f} without the drafter"
        )
    num_identical = sum(row["num_identical"] for row in rows)
    num_rows = sum(row["num_rows"] for row in rows)
    print(f"{num_identical} of {num_rows} rollouts are the text of the target alone")
    if args.output is not None:
        args.output.write_text(json.dumps({"provenance": origin, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    if num_identical < num_rows:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
