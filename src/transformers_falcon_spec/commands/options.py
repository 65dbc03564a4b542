"""Every command of `falcon-spec` and its options, each declared once.

Help must answer at once, so nothing here loads PyTorch or Transformers before a command runs.
"""

import json
import os
import re
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ..core.options import option as bounded
from ..errors import OptionError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..evaluation.prompts import Prompt
    from ..training.conversations import ConversationSet

DEFAULT_METHOD = "falcon"
KEY_VARIABLE = "FALCON_SPEC_API_KEY"
DTYPE_HELP = "float32, bfloat16 or float16; auto is the type that the target was saved in."
TARGET_HELP = "Folder or Hub name of the target."
SEEDS = {"least": -(2**63), "most": 2**64 - 1}  # that PyTorch takes
GGUF_HELP = "GGUF file of the target's weights. A folder that holds one, and no other weights, needs no name."


def option(text: str, default: Any = MISSING, **others: Any) -> Any:
    """Declare an option with its help text; without a default it is required. `others` are bounds, or for argparse."""
    return bounded(default, help=text, **others)


@dataclass(kw_only=True)
class TemplateOptions:
    """The arguments for the target's chat template."""

    chat_template_kwargs: str = option(
        "JSON object of arguments for the target's chat template, such as '{\"enable_thinking\": false}'.", "{}"
    )

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """The arguments for the chat template."""
        try:
            return {**json.loads(self.chat_template_kwargs)}
        except (TypeError, ValueError) as error:
            raise OptionError(
                "`--chat_template_kwargs` must be a JSON object such as '{\"enable_thinking\": false}', but it is "
                f"{self.chat_template_kwargs!r}: {error}."
            ) from error

    def check_template(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Check that the chat template knows the arguments, and log that a switch for thinking was not given."""
        from ..training.chat_template import ask_for_switch

        ask_for_switch(tokenizer, self.template_kwargs)


@dataclass(kw_only=True)
class TargetOptions:
    """The target, its dtype and its device."""

    target: str = option(TARGET_HELP)
    gguf_file: str | None = option(GGUF_HELP, None)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(DTYPE_HELP, "auto")
    device: str = option(
        "cpu, cuda or cuda:N; auto is the best there is, and several if one does not hold the target.", "auto"
    )

    def load_target(self) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
        """Load the target and its tokenizer, and check arguments for the chat template."""
        from .loading import load_target

        target, tokenizer = load_target(self.target, self.dtype, self.device, self.gguf_file)
        if isinstance(self, TemplateOptions):
            self.check_template(tokenizer)

        return target, tokenizer

    def origin(self, target: "PreTrainedModel", **settings: Any) -> dict[str, Any]:
        """Return the provenance of a result: all options of the command, and the dtype of the target."""
        from ..provenance import provenance

        dtype = str(target.dtype).removeprefix("torch.")
        return provenance(**{**vars(self), "dtype": dtype, **settings})


@dataclass(kw_only=True)
class PairOptions(TargetOptions):
    """The target and the drafter."""

    drafter: str = option("Folder or Hub name of the drafter.")

    def settings(
        self, target: "PreTrainedModel", drafter: "PreTrainedModel", *names: str, **others: Any
    ) -> dict[str, Any]:
        """Return what all measurements of a file must share: both fingerprints, the options `names`, and `others`."""
        from ..provenance import weights_fingerprint

        given = {name: getattr(self, name) for name in names}
        if "dtype" in given:  # what `auto` came to
            given["dtype"] = str(target.dtype).removeprefix("torch.")
        if isinstance(self, TemplateOptions) and self.template_kwargs:
            given["template_kwargs"] = self.template_kwargs

        weights = {"target": weights_fingerprint(target), "drafter": weights_fingerprint(drafter)}
        return {**weights, **given, **others}


@dataclass(kw_only=True)
class DraftingOptions:
    """How drafters of this package draft, and from which seed texts are drawn."""

    draft_tree: str | None = option(
        "JSON file, as `trees` writes it, of a static tree to draft instead of the drafter's own trees, or `paper`, "
        "the tree that the Falcon paper shows.",
        None,
    )
    capture: Literal["auto", "yes", "no"] | None = option(
        "Whether the work of a step is captured once and replayed. auto: on CUDA where the call allows it. yes: a "
        "call that cannot be captured is an error that says why; a CPU, which captures nothing, decodes in the same "
        "fixed shapes. None leaves it to the drafter's own options.",
        None,
    )
    seed: int = option("Seed of the sampling.", 0, **SEEDS)


@dataclass(kw_only=True)
class TextOptions(TemplateOptions):
    """The prompts, and the length of the texts."""

    prompts: list[str] = option("JSON lines files of prompts; each is a set named after its file.")
    limit: int | None = option("Use this many prompts of each file only.", None, least=1)
    max_new_tokens: int = option("Most tokens of a text.", 128, least=1)

    def read_prompts(self) -> "list[Prompt]":
        """Read the prompts."""
        from ..evaluation.prompts import read_prompts

        return read_prompts(self.prompts, self.limit, self.template_kwargs)


@dataclass(kw_only=True)
class ResultOptions:
    """The results file; single measurements are in a second file of the same name."""

    output: str = option(
        "JSON file to write; single measurements go to the same name with .jsonl, from which a later run continues."
    )

    def __post_init__(self) -> None:
        """Check the name of the results file, from which other names are made."""
        if Path(self.output).suffix != ".json":
            raise OptionError(
                f"`output` must end in `.json`, but it is `{self.output}`; other files are named after it."
            )

    @property
    def records_file(self) -> Path:
        """The file of single measurements, from which an interrupted run continues."""
        return Path(self.output).with_suffix(".jsonl")

    def write(self, result: dict[str, Any]) -> None:
        """Write the results to the JSON file."""
        from ..drafters.checkpoint import write_whole

        write_whole(self.output, json.dumps(result, indent=1, allow_nan=False) + "\n")


@dataclass(kw_only=True)
class DataOptions(TemplateOptions):
    """The conversations."""

    needs_answers: ClassVar[bool] = True
    data: list[str] = option(
        "Conversations, best answered by `regenerate`: files, folders, or data sets of the Hub as NAME, NAME:SPLIT or "
        "NAME:CONFIGURATION:SPLIT."
    )
    limit: int | None = option("Read this many conversations only.", None, least=1)

    def read_conversations(self, sources: list[str] | None = None) -> "ConversationSet":
        """Read the conversations of `sources`, by default of `data`."""
        from ..training.conversations import read_conversations

        return read_conversations(self.data if sources is None else sources, self.limit, self.needs_answers)


@dataclass(kw_only=True)
class GenerateCommand(PairOptions, TextOptions, DraftingOptions):
    """`falcon-spec generate`: stream text from a target with a drafter; `--compare` also runs the target alone.

    The comparison checks token for token that both texts are the same, and shows what took the time. `--show_tree`
    prints the tree of each step instead of streaming the text; docs/train_your_own.md explains it.
    """

    prompt: list[str] = option("Prompts, each in quotes.", [])
    prompts: list[str] = option("JSON lines files of prompts.", [])
    compare: bool = option("Also run the target alone, and compare texts and times.", False)
    temperature: float = option("0 is greedy; above, samples are drawn.", 0.0, least=0)
    top_p: float = option("Draw from the smallest set of this mass.", 1.0, above=0, most=1)
    show_tree: bool = option("Print the tree of each step: tokens, and which were accepted.", False)

    def __post_init__(self) -> None:
        """Check that there are prompts."""
        if not self.prompt and not self.prompts:
            raise OptionError("There must be something to write after: give `--prompt TEXT` or `--prompts FILE`.")

    @property
    def options(self) -> dict[str, bool | float | int]:
        """The sampling options for `generate`."""
        if not self.temperature:
            return {"do_sample": False}

        return {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": 0}


@dataclass(kw_only=True)
class BenchCommand(TargetOptions, TextOptions, DraftingOptions, ResultOptions):
    """`falcon-spec bench`: measure speed and acceptance of methods on prompt files, and write the results as JSON.

    A method is a drafter of this package, stock generation with a small model or a DFlash drafter, or stock prompt
    lookup:
      models/falcon-reference   a folder or Hub name; its config says which of those it is
      prompt-lookup             Transformers' prompt lookup of 10 tokens
    Each is called after its folder. Runs of the target alone and of all methods are interleaved. Stock methods and
    the target alone run without code of this package. If a method raises an error, the benchmark ends; the same
    command continues where it stopped. docs/results.md explains every number.

    Example, on the embedded pair:
      falcon-spec bench --target models/reference-target --methods models/falcon-reference prompt-lookup
                        --prompts benchmarks/prompts/gsm8k.jsonl --limit 10 --output speed.json
    """

    methods: list[str] = option("What to compare with the target alone, as listed above.")
    decodings: list[str] = option("Names of decodings; see the docs.", ["greedy", "temperature-0.7"])
    max_new_tokens: int = option("Most tokens of a text.", 128, least=2)


@dataclass(kw_only=True)
class ParityCommand(PairOptions, TextOptions, DraftingOptions, ResultOptions):
    """`falcon-spec parity`: check on prompt files that the text with the drafter is the target's own.

    For each prompt and decoding the target writes a text alone and one with the drafter, from the same seed.
    Results are written as JSON. Two texts are
      identical  if they have the same tokens;
      a tie      if at the first difference nothing but the target's logits differs, they differ by rounding alone, and
                 the best two tokens are at most 4 times that difference apart: reading a tree adds the same numbers in
                 another order;
      a bug      otherwise.
    The exit status is 0 if no bug was found, else 1. An interrupted check continues where it stopped.

    Example, on the embedded pair:
      falcon-spec parity --target models/reference-target --drafter models/falcon-reference --dtype bfloat16
                         --prompts benchmarks/prompts/gsm8k.jsonl --limit 10 --output parity.json
    """

    decodings: list[str] = option("Names of decodings; docs/options.md lists them.", ["greedy"])
    tune: bool = option(
        "Let the tuner choose how much each step drafts, as `generate` does by default. Without it every step drafts.",
        False,
    )


@dataclass(kw_only=True)
class CalibrateCommand(PairOptions, TextOptions, ResultOptions):
    """`falcon-spec calibrate`: fit temperatures that make a drafter's probabilities come true, and save them.

    Grown trees keep the nodes with the highest probabilities. These are right if of all nodes with probability p
    whose parent was accepted a share p is accepted. The target and the drafter write texts, greedy and at two
    temperatures, and the temperatures are fitted to the tokens that the target chose. They never change the text.
    Use held-out prompts, not those of a benchmark. An interrupted run continues where it stopped.

    Example, on the embedded pair:
      falcon-spec calibrate --target models/reference-target --drafter models/falcon-reference
                            --prompts benchmarks/prompts/held_out.jsonl --output runs/calibration.json --save
    """

    max_new_tokens: int = option("Most tokens of a text.", 96, least=1)
    save: bool = option("Store the temperatures in the `config.json` of the drafter's folder.", False)
    seed: int = option("Seed of the draws.", 0, **SEEDS)


@dataclass(kw_only=True)
class ServeCommand(PairOptions, TemplateOptions):
    """`falcon-spec serve`: serve a target with its drafter over HTTP, with the endpoints of OpenAI.

    Any client of OpenAI's completions and chat completions works; docs/serving.md shows two. Requests that wait are
    written as one batch where they can be. Needs the extra `serve`.

    Example:
      falcon-spec serve --target Qwen/Qwen3-8B --drafter someone/falcon-qwen3-8b
    """

    host: str = option("Address to listen at; 0.0.0.0 for all of the machine's.", "127.0.0.1")
    port: int = option("Port to listen at; 0 takes a free one.", 8000, least=0)
    max_queue: int = option("Most requests that wait; more are told to come again (status 429).", 64, least=1)
    max_batch: int = option("Most requests that are written as one batch.", 8, least=1)
    max_kept_tokens: int = option(
        "Most tokens of former texts that are kept for each `user`, or `prompt_cache_key`, that requests name: what "
        "comes again there is drafted. 0 keeps none.",
        0,
        least=0,
    )
    api_key: str | None = option(
        f"Key that clients must send, all but those of `/health`. Other users of the machine see options: the "
        f"environment variable {KEY_VARIABLE} is read where this is left out.",
        None,
    )

    def __post_init__(self) -> None:
        """Read the key from the environment, and check it."""
        if self.api_key is None:
            self.api_key = os.environ.get(KEY_VARIABLE)

        if self.api_key is not None and not re.fullmatch("[!-~]+", self.api_key):
            raise OptionError(
                f"`api_key`, or {KEY_VARIABLE}, must be letters, digits and signs of ASCII without spaces, but it "
                "is empty or holds others."
            )


@dataclass(kw_only=True)
class RegenerateCommand(TargetOptions, DataOptions):
    """`falcon-spec regenerate`: let the target write its own answers to the prompts of a training set.

    With `--endpoint` a server that serves the target answers, such as vLLM, SGLang or llama.cpp: any that speaks
    OpenAI's chat completions. Of the target only the tokenizer is loaded then. A key is read from the variable
    OPENAI_API_KEY.

    Example:
      falcon-spec regenerate --target models/reference-target --data conversations.jsonl --output answered.jsonl
      falcon-spec regenerate --target Qwen/Qwen3-8B --endpoint http://localhost:8000/v1 --data conversations.jsonl
                             --output answered.jsonl --chat_template_kwargs '{"enable_thinking": false}'
    """

    needs_answers: ClassVar[bool] = False
    data: list[str] = option("Conversations, or questions alone, as `train` reads them.")
    output: str = option("JSON lines file to write; what is done is kept beside it, from which a later run goes on.")
    endpoint: str | None = option("Address of an OpenAI-compatible server, such as http://localhost:8000/v1.", None)
    endpoint_model: str | None = option("The target's name at the server; None is that of `--target`.", None)
    concurrency: int = option("Requests to the server at once.", 16, least=1)
    timeout_seconds: float = option(
        "The longest time for an answer, after which it is asked for again.", 600.0, above=0
    )

    def __post_init__(self) -> None:
        """Check that `train` reads a file of that name, and that a model is named to a server alone."""
        if not self.output.endswith((".jsonl", ".ndjson", ".json")):
            raise OptionError(
                f"`output` must end in .jsonl, .ndjson or .json, as `train` reads it, but it is `{self.output}`."
            )
        if self.endpoint_model is not None and self.endpoint is None:
            raise OptionError("`endpoint_model` must come with `endpoint`, the server that knows the target by it.")


@dataclass(kw_only=True)
class TrainCommand(DataOptions):
    """`falcon-spec train`: distil a drafter from a target, on conversations that the target answered.

    Example: a drafter in 20 steps, on a single conversation (docs/train_your_own.md has the whole way):
      echo '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}' > talk.jsonl
      falcon-spec train --target models/reference-target --data talk.jsonl --output_dir my-drafter --max_steps 20
                        --report_to none
      falcon-spec generate --target models/reference-target --drafter my-drafter --prompt "What is 3 plus 4?" --compare
    """

    target: str = option(TARGET_HELP)
    gguf_file: str | None = option(GGUF_HELP, None)
    eval_data: list[str] = option(
        "Held-out conversations for the evaluation and the draft tree; without them one in twenty of `--data`.", []
    )
    drafter: str | None = option("Folder or Hub name of a drafter to train further; a fresh one if left out.", None)
    method: str | None = option(
        f"Kind of a fresh drafter, {DEFAULT_METHOD} if left out.",
        None,
    )
    recipe: str = option(
        "Options that go together, default or paper; given ones win over the recipe. The rate of `default` is for a "
        "drafter of width 256 and falls with the root of the width.",
        "default",
    )
    drafter_config: list[str] = option(
        "Fields of a fresh drafter's config as NAME=VALUE, e.g. `block_size=3 recurrence=token`.", []
    )
    early_stopping_patience: int | None = option(
        "Stop after so many evaluations without a better `metric_for_best_model`, e.g. acceptance_length.", None
    )
    target_dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(DTYPE_HELP, "auto")
    target_device_map: str | None = option(
        "`auto` spreads a target that is too large for one device over all of them and the memory, for one process; "
        "otherwise as `device_map` of `from_pretrained` takes it. Without it the target is on the drafter's device.",
        None,
    )
    cache_features: str | None = option(
        "Folder for the target's features: read once, then trained from. Pays from two epochs on.", None
    )
    show_masks: int | None = option(
        "Show so many examples with what counts in the loss in brackets (5 if no number is given); no training.",
        None,
        nargs="?",
        const=5,
    )
    dry_run: bool = option("Print the plan, with what it takes of memory and disk; no training.", False)

    @property
    def default_folder(self) -> str:
        """Where the drafter is saved unless `--output_dir` says it: a folder named after the target and the kind."""
        kind = self.method or DEFAULT_METHOD if self.drafter is None else f"{Path(self.drafter).name}-trained"
        return f"{Path(self.target).name}-{kind}"

    @property
    def sources(self) -> dict[str, list[str]]:
        """The sources of conversations, for training and for evaluation, as the record names them."""
        return {"train": self.data, **({"eval": self.eval_data} if self.eval_data else {})}


# What the help of `train` says of options that recipes and the plan set; a test compares it with them.
TRAIN_NOTES = {
    "method": "One of ar, dflash, diffusion, eagle, falcon, medusa; ar and dflash are for stock `generate`.",
    "drafter_config": "By recipe: block_size=3 recurrence=token num_recurrent_layers=1 norm_inputs=true shortcut=true "
    "newest_row=true attention_bias=false transition_rank=64 (default, falcon), block_size=2 num_hidden_layers=2 "
    "recurrence=sequence block_position_embedding=false shortcut=false newest_row=false (paper, falcon).",
    "max_length": "By default 512, or as many times that as leave 95% of the examples whole, up to the target's "
    "context.",
    "use_glancing": "By recipe: False (default, falcon), True (paper, falcon); otherwise True.",
    "glancing_ratio": "By recipe: 0.4 (paper, falcon); otherwise 0.4.",
    "feature_loss_weight": "By recipe: 0.1 (default, falcon), 1.0 (paper, falcon); otherwise 1.0.",
    "token_loss_weight": "By recipe: 1.0 (default, falcon), 0.1 (paper, falcon); otherwise 0.1.",
    "draft_tree_nodes": "By recipe: 0 (paper, falcon); otherwise 16.",
    "output_dir": "By default `TARGET-falcon`, after target and kind.",
    "per_device_train_batch_size": "Rows that are read at a time. By default 8, or fewer where an estimate says that "
    "they would take more than half of the free memory.",
    "num_train_epochs": "Epochs, instead of steps.",
    "max_steps": "By default 8 epochs, but no more than 8000 steps unless one epoch takes more.",
    "learning_rate": "By recipe: 0.002 (default, falcon), 0.0005 (paper, falcon); otherwise 0.0005.",
    "lr_scheduler_type": "By recipe: cosine (default, falcon), linear (paper, falcon); otherwise linear.",
    "warmup_steps": "By recipe: 0.025 (default, falcon), 0 (paper, falcon); otherwise 0.",
    "gradient_accumulation_steps": "Batches of a step. By default what makes 8 rows a step.",
    "bf16": "By default on CUDA where the GPU has it.",
    "logging_steps": "Steps from one line of the log to the next. By default a twentieth of the run, 100 at most.",
    "report_to": "Who is told of losses and metrics: none, tensorboard, wandb, trackio ... (default: none)",
    "eval_strategy": "When to evaluate besides the one time at the end: no, steps or epoch. (default: no)",
    "save_total_limit": "Checkpoints to keep. By default the newest.",
    "seed": "(default: 42)",
    "resume_from_checkpoint": "`true` goes on from the newest checkpoint in the folder, after a break; "
    "`false` writes over what the folder holds.",
}


@dataclass(kw_only=True)
class TreesCommand(PairOptions, TextOptions, ResultOptions):
    """`falcon-spec trees`: measure acceptance by depth and sibling rank, and write the best static tree of a size.

    The drafter drafts a wide tree in the decoding loop, on prompts that are neither training data nor part of a
    benchmark. The best tree of N nodes has the N nodes that are accepted most often; docs/train_your_own.md
    explains why. An interrupted fit continues where it stopped.

    Example:
      falcon-spec trees --target models/reference-target --drafter models/falcon-reference --nodes 12
                        --prompts benchmarks/prompts/held_out.jsonl --output tree.json
    """

    prompts: list[str] = option(
        "JSON lines files. Neither training text, where drafters are better than elsewhere, nor what is benchmarked "
        "with the tree later."
    )
    nodes: int = option("Nodes of the tree, root included.", least=2)
    max_new_tokens: int = option("Most tokens of a text.", 128, least=2)
    passes: int | None = option(
        "Drafter passes of a draft; None uses those of the drafter's present tree.", None, least=1
    )
    decodings: list[str] = option(
        "Names of decodings, see docs/options.md; the tree is fitted to all of them together.",
        ["greedy", "temperature-0.7"],
    )
    save: bool = option("Put the tree into the drafter's config.json.", False)
    seed: int = option("Seed of the sampling.", 0, **SEEDS)


@dataclass(kw_only=True)
class ConvertCommand:
    """`falcon-spec convert`: make a drafter of this package from a checkpoint of other software.

    Falcon, Eagle, Eagle-3, DFlash, speculators and Medusa checkpoints, and diffusion models such as Dream, are
    recognised by their config and weights. DEST is then loaded like any drafter. docs/convert.md lists the
    formats.

    Example, on a folder with `config.json` and weights of Eagle-3:
      falcon-spec convert downloads/eagle3 my-drafter --target downloads/its-target
    """

    source: str = option("Folder or Hub id of the checkpoint.", positional=True)
    dest: str = option("Folder to write; new or empty.", positional=True)
    target: str | None = option(
        "Folder or Hub id of the target, for facts that the checkpoint lacks, and to tell copies of its weights.", None
    )
    gguf_file: str | None = option(GGUF_HELP, None)


@dataclass(kw_only=True)
class ExportCommand:
    """`falcon-spec export`: write an Eagle or DFlash drafter in the form that speculators, vLLM or SGLang reads.

    DEST gets a config.json and a model.safetensors that these load with code of their own. docs/serving.md has the
    command lines of the engines, and what is lost there.

    Example, on a drafter that `train` wrote:
      falcon-spec export my-drafter my-drafter-vllm --format vllm
    """

    drafter: str = option("Folder or Hub id of an Eagle or DFlash drafter.", positional=True)
    dest: str = option("Folder to write; new or empty.", positional=True)
    format: Literal["speculators", "vllm", "sglang"] = option("Whose form is written: speculators, vllm or sglang.")


@dataclass(kw_only=True)
class FindCommand:
    """`falcon-spec find`: list the drafters that people published on the Hub for a target.

    The card of a drafter names its target as `base_model`. Drafters of this package are listed, and those of other
    software whose config says that they are Eagle-3 or DFlash: they are converted when they are loaded
    (docs/convert.md). Whether a drafter fits a loaded target is checked when it is used, and by `falcon-spec doctor`.

    Example:
      falcon-spec find --target Qwen/Qwen3-0.6B
    """

    target: str = option("Name of the target on the Hub.")
    json: bool = option("Print JSON instead of a table.", False)


@dataclass(kw_only=True)
class DoctorCommand(TargetOptions, TextOptions):
    """`falcon-spec doctor`: find out why drafts are rejected, or why decoding is not faster, and what to do.

    Without `--drafter` it says whether the target can be drafted for, and why not.

    It says where a converted drafter comes from, and checks the machine, the target that the drafter's config
    names, and how the target reads trees. Then it writes a few texts with and without the
    drafter, and compares acceptance with the training record, and the cost of steps with the tokens that they
    write. Each finding has a section in docs/troubleshooting.md.

    Example, on the embedded pair:
      falcon-spec doctor --target models/reference-target --drafter models/falcon-reference
    """

    drafter: str | None = option(
        "Folder or Hub name of the drafter; without one it says whether the target can be drafted for, and why not.",
        None,
    )
    prompts: list[str] = option("JSON lines files of prompts; a few questions if left out.", [])
    limit: int | None = option("Use this many prompts of each file only.", 4, least=1)
    max_new_tokens: int = option("Most tokens of a text.", 64, least=1)
    json: bool = option("Print the report as JSON.", False)


@dataclass(kw_only=True)
class PublishCommand:
    """`falcon-spec publish`: put a drafter on the Hub with its card and its figures.

    `load_drafter(REPO, target)` loads it. The access token is that of `hf auth login` or `HF_TOKEN`; there is no
    option for it, so that it does not get into logs. docs/convert.md lists what is uploaded.

    With --dry_run or --output FOLDER nothing is sent.

    Example:
      falcon-spec publish my-drafter someone/falcon-qwen3-8b --target Qwen/Qwen3-8B
                          --results speed.json --about about.json
    """

    drafter: str = option("Folder of the drafter.", positional=True)
    repo: str = option("OWNER/NAME on the Hub; made if it does not exist.", positional=True)
    target: str | None = option("Hub name of the target; None takes the one in the drafter's config.", None)
    results: list[str] = option("Results files of `falcon-spec bench` that measured this drafter.", [])
    about: str | None = option("JSON file with `license`, `data` (name and licence of each source) and `notes`.", None)
    private: bool = option("Make the repository private, if it does not exist yet.", False)
    revision: str | None = option("A branch to commit to instead of `main`.", None)
    dry_run: bool = option("List what would be published, after all checks; nothing is sent.", False)
    output: str | None = option("Write what would be published into this folder, new or empty; nothing is sent.", None)
