"""Share of HumanEval problems that one completion each solves, with its interval; runs the completions in a sandbox."""

from typing import Any

import datasets
import evaluate

from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.evaluation.metrics import require_rows
from transformers_falcon_spec.evaluation.sandbox import Limits, run_program
from transformers_falcon_spec.evaluation.summary import wilson_interval

FIELDS = ("task_id", "prompt", "entry_point", "canonical_solution", "test")
INPUTS = """
Args:
    predictions: What follows each prompt: the body of the function, or the whole function again. Code, no Markdown.
    references: Rows of HumanEval, with their five fields.
    allow_code_execution: Must be True: programs that a model wrote are run on this machine.
    timeout_seconds: For each program.
    memory_bytes: For each program.

Returns:
    pass_at_1: Share of problems whose tests pass, with pass_at_1_interval (95 %, Wilson).
    num_passed, num_problems: The counts behind it.
    outcomes: For each problem its task_id, whether it passed, and why not.
    is_network_cut: False where this system gives ordinary users no way to take the network from a program.
"""


class HumanevalPassAt1(evaluate.Metric):  # type: ignore[misc]  # `evaluate` has no types
    """One program after the other, each in a process of its own."""

    def _info(self) -> Any:
        fields = {name: datasets.Value("string") for name in FIELDS}
        return evaluate.MetricInfo(
            description="Share of problems whose tests pass, with one completion for each.",
            citation="Chen et al., Evaluating Large Language Models Trained on Code (2021), arXiv 2107.03374",
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": datasets.Value("string"), "references": fields}),
        )

    def _compute(
        self,
        predictions: list[str],
        references: list[dict[str, str]],
        allow_code_execution: bool = False,
        timeout_seconds: float = Limits.timeout_seconds,
        memory_bytes: int = Limits.memory_bytes,
    ) -> dict[str, Any]:
        require_rows(predictions)
        if allow_code_execution is not True:
            raise OptionError(
                "This metric runs programs that a model wrote, with your rights to files; the sandbox protects from accidents, not "
                "from attacks. It must be told so: pass `allow_code_execution=True`, best inside a container."
            )
        limits = Limits(timeout_seconds, memory_bytes)
        outcomes = [
            run_program(_program(completion or "", problem), limits)
            for completion, problem in zip(predictions, references, strict=True)
        ]
        num_passed = sum(outcome.passed for outcome in outcomes)
        return {
            "pass_at_1": num_passed / len(outcomes),
            "pass_at_1_interval": wilson_interval(num_passed, len(outcomes)),
            "num_passed": num_passed,
            "num_problems": len(outcomes),
            "outcomes": [
                {"task_id": problem["task_id"], "passed": outcome.passed, "reason": outcome.reason}
                for problem, outcome in zip(references, outcomes, strict=True)
            ],
            "is_network_cut": all(outcome.is_network_cut for outcome in outcomes),
        }


def _program(completion: str, problem: dict[str, str]) -> str:
    return f"{problem['prompt']}{completion}\n\n{problem['test']}\n\ncheck({problem['entry_point']})\n"
