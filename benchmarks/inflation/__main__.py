"""Write a small target and its drafters at the size of a large model: the function of the small, the cost of the large.

Command: python -m benchmarks.inflation --drafters models/falcon-reference --shape 0.3b --dtype bfloat16 --output runs/inflated-0.3b
Hardware and time: one CPU core, a few seconds for each billion parameters, and the disk: files hold the zeros too. Speed measured on such a pair is
that of a large model with the SMALL model's acceptance, and must be labelled so; docs/results.md says what is and is not exact.

Sizes come from `--shape`, a name, or from the ratio of `--hidden_size` to the small model's: heads become four times as wide, and as
many as fill the width. Widths and heads grow by powers of 4 only, for RMSNorm and attention scale by square roots, and the root of a power of 4
is a power of 2, by which bf16 and float32 scale without rounding:

* `0.3b`: hidden 1024, 20 layers, as narrow as Qwen3-0.6B and a little shallower;
* `1b`: hidden 1024, 40 layers, for the usual width of 2048 is no power of 4 times 256;
* `7b`: hidden 4096, 32 layers, inner 14336, 8 key heads: Mistral 7B v0.3, vocabulary included.

Drafters may be Falcon, Eagle (versions 1 and 3), Medusa, lookahead, diffusion drafters made of the target's layers, and Llamas of their own; others
are refused by name.

For a benchmark in the same process nothing need be written: `benchmarks.inflation.inflate` builds on a device.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, logging

from benchmarks.inflation import SHAPES, Shape, inflate, inflate_drafter
from transformers_falcon_spec.commands.loading import DTYPES, load_drafter, load_target
from transformers_falcon_spec.drafters.fingerprint import TargetFingerprint
from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.provenance import portable, provenance, weights_fingerprint

WHAT = "function of the small model, cost of the large one"


def chosen_shape(small: Shape, name: str | None, hidden_size: int | None, depth: int | None, ids: int | None) -> Shape:
    """The shape of that name, or the small one; widened, deepened and given more ids as asked."""
    shape = SHAPES[name] if name else small
    if name and hidden_size:
        raise OptionError("`--shape` names a whole shape: leave out `--hidden_size`, or `--shape`.")
    if hidden_size:
        shape = small.widened(hidden_size, small.num_hidden_layers, small.vocab_size)
    return replace(shape, num_hidden_layers=depth or shape.num_hidden_layers, vocab_size=ids or shape.vocab_size)


def load_small_drafter(folder: str, target: PreTrainedModel) -> PreTrainedModel:
    """A drafter, or a draft model that is a Llama of its own."""
    if AutoConfig.from_pretrained(folder).model_type == "llama":
        return AutoModelForCausalLM.from_pretrained(folder, dtype=target.dtype).eval()
    return load_drafter(folder, target)


def write_card(output: Path, card: dict[str, Any]) -> None:
    """Say what the folders hold, for readers and for programs."""
    (output / "inflation.json").write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")
    sizes = ", ".join(f"`{name}` {size}" for name, size in card["shape"].items())
    models = "\n".join(f"- `{name}`: {count:,} parameters" for name, count in card["num_parameters"].items())
    (output / "README.md").write_text(
        f"# {card['target']}, inflated\n\n"
        f"{WHAT[0].upper()}{WHAT[1:]}: zeros around the small model's weights, and layers that add nothing. Speed measured\n"
        "on these folders is that of models of this shape with the small pair's acceptance; their text is the small one's.\n\n"
        f"Shape of the target: {sizes}; {card['dtype']}.\n\n{models}\n\nMade by `{card['provenance']['command']}`, "
        f"commit `{card['provenance']['commit'][:12]}`; `inflation.json` holds the rest.\n",
        encoding="utf-8",
    )


def name_target(config: Any, folder: Path, fingerprint: dict[str, Any] | None) -> None:
    """Tell the config of an inflated drafter its inflated target; draft models of their own have no such fields."""
    for name, value in (("target_name_or_path", str(folder)), ("target_fingerprint", fingerprint)):
        if hasattr(config, name):
            setattr(config, name, value)


def main(argv: Sequence[str] | None = None) -> None:
    """Inflate a target and its drafters into a folder each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="models/reference-target")
    parser.add_argument("--drafters", nargs="*", default=[], help="folders; each keeps the last part of its name")
    parser.add_argument("--shape", choices=list(SHAPES))
    parser.add_argument("--hidden_size", type=int)
    parser.add_argument("--num_layers", type=int)
    parser.add_argument("--vocab_size", type=int)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--output", type=Path, required=True, help="new folder; `target` and the drafters go into it")
    args = parser.parse_args(argv)
    logging.set_verbosity_error()
    target, tokenizer = load_target(args.target, "float32", "cpu")
    shape = chosen_shape(Shape.of(target.config), args.shape, args.hidden_size, args.num_layers, args.vocab_size)
    folders = {"target": args.target, **{Path(folder).name: folder for folder in args.drafters}}
    if len(folders) <= len(args.drafters):
        raise OptionError(f"Drafters must have names of their own, other than `target`, but they are {args.drafters}.")
    if args.output.exists() and any(args.output.iterdir()):
        raise OptionError(f"`{args.output}` must be empty or new, but it holds files. Choose another folder.")
    counts, fingerprint = {}, None
    for name, folder in folders.items():
        if name == "target":
            large = inflate(target, shape, dtype=DTYPES[args.dtype])
            fingerprint = TargetFingerprint.of_target(large, tokenizer).to_json()
            tokenizer.save_pretrained(args.output / name)
        else:
            drafter = load_small_drafter(folder, target)
            large = inflate_drafter(drafter, target, shape, dtype=DTYPES[args.dtype])
            name_target(large.config, args.output / "target", fingerprint)
        large.save_pretrained(args.output / name)
        counts[name] = large.num_parameters()
        del large  # one at a time in memory
        print(f"{args.output / name} has {counts[name]:,} parameters")
    write_card(
        args.output,
        {
            "what": WHAT,
            "target": portable(args.target),
            "drafters": portable(args.drafters),
            "small_fingerprint": weights_fingerprint(target),
            "shape": asdict(shape),
            "dtype": args.dtype,
            "num_parameters": counts,
            "provenance": provenance(seed=None),
        },
    )


if __name__ == "__main__":
    main()
