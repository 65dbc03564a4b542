"""Does calibration keep more of a draft? Acceptance length of grown trees of equal size, as the drafter is and calibrated.

Command: python benchmarks/calibrated_length.py --calibration benchmarks/results/calibration.json --skip 30
Hardware and time: one busy CPU core, about ten minutes. The temperatures come from a results file of `falcon-spec calibrate`; take prompts that it
did not see. Lengths do not depend on the clock. Writes `benchmarks/results/calibrated_length.json`; each text goes to `--records`,
where a later run goes on.
"""

import argparse
import copy
import json
from itertools import product
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import logging

from transformers_falcon_spec import SpeculationConfig
from transformers_falcon_spec.commands.loading import load_drafter, load_target
from transformers_falcon_spec.evaluation.decoding import decoding_options
from transformers_falcon_spec.evaluation.prompts import Prompt, read_prompts
from transformers_falcon_spec.evaluation.records import Records
from transformers_falcon_spec.evaluation.summary import bootstrap
from transformers_falcon_spec.generation.timed import timed_generate
from transformers_falcon_spec.provenance import provenance, weights_fingerprint

HERE = Path(__file__).parent
Counts = tuple[int, int]  # accepted tokens and steps of a text


def length(texts: list[Counts]) -> float:
    """Tokens a step, the bonus token included."""
    return 1 + sum(accepted for accepted, _ in texts) / sum(steps for _, steps in texts)


def gain(pairs: list[tuple[Counts, Counts]]) -> float:
    """Length of the second of each pair over that of the first."""
    return length([second for _, second in pairs]) / length([first for first, _ in pairs])


def arms_of(drafter: Any, fit: dict[str, list[float]], num_nodes: int, num_passes: int) -> dict[str, Any]:
    """The same drafter twice: as it is, and calibrated."""
    depth, arms = num_passes * drafter.block_size, {}
    for name, temperatures in (("as it is", None), ("calibrated", fit)):
        arm = arms[name] = copy.copy(drafter)  # the same weights
        arm.config = copy.copy(drafter.config)
        arm.config.confidence_temperatures = temperatures
        arm.generation_config = SpeculationConfig(
            tune=False, dynamic_tree=True, num_tree_nodes=num_nodes, tree_depth=depth
        )
    return arms


def row_of(found: dict[str, Counts], prompts: list[Prompt], shape: tuple[int, int], decoding: str) -> dict[str, Any]:
    """Lengths of both arms with trees of one shape, and their ratio."""
    nodes, passes = shape
    keys = [f"{prompt.prompt_id}|{nodes}|{passes}|{decoding}" for prompt in prompts]
    pairs = [(found[f"{key}|as it is"], found[f"{key}|calibrated"]) for key in keys]
    row = {
        "num_tree_nodes": nodes,
        "num_passes": passes,
        "decoding": decoding,
        "num_prompts": len(pairs),
        "length_as_it_is": length([first for first, _ in pairs]),
        "length_calibrated": length([second for _, second in pairs]),
        "gain": gain(pairs),
        "gain_interval": bootstrap(pairs, gain, 0),
    }
    print(row)
    return row


def main() -> None:
    """Write every text with both arms, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="models/reference-target")
    parser.add_argument("--drafter", default="models/falcon-reference")
    parser.add_argument("--calibration", type=Path, default=HERE / "results" / "calibration.json")
    parser.add_argument("--prompts", default=str(HERE / "prompts" / "held_out.jsonl"))
    parser.add_argument("--skip", type=int, default=0, help="prompts at the start that are left out")
    parser.add_argument("--limit", type=int, default=None, help="use the prompts up to this one")
    parser.add_argument("--nodes", type=int, nargs="+", default=[16])
    parser.add_argument("--passes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--decodings", nargs="+", default=["greedy", "temperature-0.7"])
    parser.add_argument("--max_new_tokens", type=int, default=96)
    parser.add_argument("--records", type=Path, default=Path("runs/calibrated_length.jsonl"))
    parser.add_argument("--output", type=Path, default=HERE / "results" / "calibrated_length.json")
    args = parser.parse_args()
    logging.set_verbosity_error()
    target, tokenizer = load_target(args.target, "float32", "cpu")
    drafter = load_drafter(args.drafter, target)
    fit = json.loads(args.calibration.read_text(encoding="utf-8"))["fit"]
    settings = {"drafter": weights_fingerprint(drafter), "fit": fit, "max_new_tokens": args.max_new_tokens}
    records = Records(args.records, settings)
    found = {entry["key"]: (entry["num_accepted"], entry["num_steps"]) for entry in records.entries}
    prompts = read_prompts([args.prompts], args.limit)[args.skip :]
    shapes = list(product(args.nodes, args.passes))
    for prompt, (nodes, passes), decoding in tqdm(list(product(prompts, shapes, args.decodings)), unit="pair"):
        ids = prompt.input_ids(tokenizer)
        for name, arm in arms_of(drafter, fit, nodes, passes).items():
            key = f"{prompt.prompt_id}|{nodes}|{passes}|{decoding}|{name}"
            if key in found:
                continue
            run = timed_generate(target, ids, args.max_new_tokens, decoding_options(decoding), 0, arm)
            stats = run.output.speculation
            found[key] = (stats.num_accepted, stats.num_steps)
            records.append({"key": key, "num_accepted": stats.num_accepted, "num_steps": stats.num_steps})
    rows = [row_of(found, prompts, shape, decoding) for shape, decoding in product(shapes, args.decodings)]
    origin = provenance(seed=0, **{key: str(value) for key, value in vars(args).items()})
    args.output.write_text(
        json.dumps({"provenance": origin, "fit": fit, "rows": rows}, indent=1) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
