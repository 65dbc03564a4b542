"""A stage for the walk of `examples/qwen3_8b.md`: its own commands, with a small target under the name of Qwen3-8B.

The Hub is one on localhost, data sets lie in folders of their names, and `vllm serve` starts the server of this package with
a drafter that needs no training. Nothing but sizes and the device is changed in the commands.
"""

import hashlib
import json
import os
import re
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tests.convert import foreign
from tests.hub.repositories import LARGE, Hub
from tests.hub.server import running
from transformers_falcon_spec import LookaheadDrafter
from transformers_falcon_spec.evaluation.prompts import read_prompts

ROOT = Path(__file__).parents[1]
PAGE, NOTEBOOK = ROOT / "examples" / "qwen3_8b.md", ROOT / "examples" / "qwen3_8b.ipynb"
TARGET, FOREIGN, PUBLISHED = "Qwen/Qwen3-8B", "RedHatAI/Qwen3-8B-speculator.eagle3", "your-name/falcon-qwen3-8b"
DRAFTER = "falcon-qwen3-8b"  # the folder of the drafter
BASH = "%%bash\n"  # the first line of a cell of commands
NUM_TALKS = 60  # conversations of the largest data set
TOKEN = "hf_" + "b" * 34  # of `your-name`
# What is smaller on the stage; each must occur.
SIZES = {
    r"40_000": str(NUM_TALKS),
    r"15_000": "8",
    r"rows\[500:\]": "rows[16:]",
    r"rows\[:300\]": "rows[:4]",
    r"rows\[300:500\]": "rows[4:16]",
    r"--max_new_tokens 1024": "--max_new_tokens 64",
    r"--max_new_tokens 256|max_new_tokens=256": lambda found: found[0].replace("256", "32"),
    r"--limit 20\b": "--limit 2",
    r"--limit 100\b": "--limit 12",
    r"--concurrency 128": "--concurrency 4",
    r"--max_length 2048": "--max_length 512",
    r"--num_train_epochs 3": "--max_steps 100 --eval_decode_tokens 16",
    r"_steps 2500": "_steps 50",
    r"--eval_decode_prompts 32": "--eval_decode_prompts 2",
    r"--nodes 32": "--nodes 8",
    r"--device cuda": "--device cpu",
    r"--dtype bfloat16": "--dtype float32",
    r"sleep 5": "sleep 0.2",
}  # fmt: skip
MAKE_ENVIRONMENT = """#!/bin/sh
[ "$1 $2" = "-m venv" ] || exit 1
mkdir -p "$3/bin" && cp "$STAGE/pip" "$STAGE/vllm" "$3/bin/"
"""
SERVE = """#!/bin/sh
[ "$1 $3" = "serve --port" ] || exit 1
exec falcon-spec serve --target "$2" --drafter "$STAGE/lookahead" --port "$4"
"""


def cells(notebook: Path = NOTEBOOK) -> list[str]:
    """The code of the notebook, cell by cell."""
    found = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == "code"]


def smaller(code: str) -> str:
    """The code with the sizes of the stage."""
    for pattern, value in SIZES.items():
        code = re.sub(pattern, value, code)
    return code


@dataclass(frozen=True)
class Run:
    """What a cell printed, and the seconds that it took, of the clock and of processors."""

    output: str
    seconds: float
    cpu_seconds: float


@dataclass(frozen=True)
class Stage:
    """A folder with what a walker finds on the Hub and on the machine."""

    folder: Path
    hub: Hub
    port: int
    settings: dict[str, str] = field(default_factory=dict)

    def run(self, code: str) -> Run:
        """Run a cell in a process of its own; it must succeed."""
        is_bash = code.startswith(BASH)
        code = smaller(code.removeprefix(BASH)).replace("8000", str(self.port))
        command = ["bash", "-euo", "pipefail", "-c", code] if is_bash else [sys.executable, "-c", code]
        start, before = time.perf_counter(), os.times()
        with (self.folder / "output.txt").open("w+b") as file:  # a pipe would wait for the server that a cell starts
            done = subprocess.run(
                command, cwd=self.folder, env=self.environment, stdout=file, stderr=subprocess.STDOUT, check=False
            )
            file.seek(0)
            output = file.read().decode(errors="replace")
        after = os.times()
        cpu = after.children_user + after.children_system - before.children_user - before.children_system
        assert done.returncode == 0, f"{code}\n{output[-4000:]}"
        return Run(output, time.perf_counter() - start, cpu)

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a walker, whose only Hub is that of the stage, logged in as the one who publishes."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        paths = [self.folder / "stubs", Path(sys.executable).parent, kept["PATH"]]
        home = {"HOME": self.folder / "home", "HF_HOME": self.folder / "hf", "STAGE": self.folder / "stubs"}
        own = {**home, "HF_ENDPOINT": self.hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": 1}
        more = {"PYTHONPATH": ROOT / "src", "PATH": ":".join(map(str, paths)), "OMP_NUM_THREADS": 1, "COLUMNS": 160}
        return {**kept, **{name: str(value) for name, value in {**own, **more, **self.settings}.items()}}


@contextmanager
def stage(folder: Path, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Iterator[Stage]:
    """A stage on which `target` is Qwen3-8B."""
    with running(folder / "hub") as hub:
        hub.tokens[TOKEN] = PUBLISHED.partition("/")[0]
        for path in (folder / "model", folder / "stubs" / "lookahead"):
            path.mkdir(parents=True)
        target.save_pretrained(folder / "model"), tokenizer.save_pretrained(folder / "model")
        publish(hub, TARGET, folder / "model")
        _published(folder / "foreign", target)
        publish(hub, FOREIGN, folder / "foreign")
        (folder / "benchmarks").symlink_to(ROOT / "benchmarks")
        _data_sets(folder)
        _stubs(folder / "stubs", target)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        yield Stage(folder, hub, port)


def publish(hub: Hub, repo: str, folder: Path) -> None:
    """Put the files of a folder on the Hub of the stage, in one commit."""
    files = {}
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        files[path.name] = {"oid": hub.keep(content), "size": len(content), "lfs": path.name.endswith(LARGE)}
    commit = hashlib.sha1(repo.encode()).hexdigest()
    hub.save(repo, {"private": False, "refs": {"main": commit}, "commits": {commit: {"files": files, "title": ""}}})


def _published(folder: Path, target: PreTrainedModel) -> None:
    """An Eagle-3 drafter of random weights for the target, in the published form, with a card that names the target."""
    sizes = target.config.to_dict()
    names = foreign.SIZES.keys() & sizes.keys() - {"num_hidden_layers", "model_type"}
    last = target.config.num_hidden_layers - 1
    config, weights = foreign.eagle3(
        **{name: sizes[name] for name in names},
        head_dim=sizes["hidden_size"] // sizes["num_attention_heads"],
        architectures=["LlamaForCausalLMEagle3"],
        eagle_aux_hidden_state_layer_ids=[0, last // 2, last],
    )
    foreign.written(folder, config, weights)
    (folder / "README.md").write_text(f"---\nbase_model: {TARGET}\n---\n", encoding="utf-8")


def talk(number: int) -> list[dict[str, str]]:
    """A conversation of one or two turns."""
    sums = [(number, number + 2), (number + 1, 3)][: 1 + number % 2]
    return [
        {"role": role, "content": text}
        for first, second in sums
        for role, text in (
            ("user", f"What is {first} plus {second}?"),
            ("assistant", f"The sum of {first} and {second} is {first + second}."),
        )
    ]


def _data_sets(folder: Path) -> None:
    """Data sets in folders of their names, which `datasets` takes first, in the form of those on the Hub."""
    chat = [{"prompt": "", "messages": talk(number)} for number in range(NUM_TALKS)]
    for row, prompt in zip(chat, _test_prompts(), strict=False):
        row["messages"] = [{"role": "user", "content": prompt}, {"role": "assistant", "content": "No."}]
    math = [{"question": f"What is {number} plus {number}?", "answer": f"{2 * number}"} for number in range(6)]
    code = [{"problem": f"What is {number} plus 9?", "solution": "pass"} for number in range(12)]
    sets: dict[str, tuple[str, str, Sequence[Any]]] = {
        "HuggingFaceH4/ultrachat_200k": ("default", "train_sft", chat),
        "openai/gsm8k": ("main", "train", math),
        "ise-uiuc/Magicoder-OSS-Instruct-75K": ("default", "train", code),
    }
    for name, (config, split, rows) in sets.items():
        (folder / name).mkdir(parents=True)
        files = {"config_name": config, "data_files": [{"split": split, "path": "rows.jsonl"}]}
        (folder / name / "README.md").write_text(f"---\nconfigs: {json.dumps([files])}\n---\n", encoding="utf-8")
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / name / "rows.jsonl").write_text(lines, encoding="utf-8")


def _test_prompts(num: int = 3) -> list[str]:
    """Prompts that are measured, which data on the Hub may hold."""
    path = ROOT / "benchmarks" / "prompts" / "mt_bench.jsonl"
    return [prompt.text for prompt in read_prompts([str(path)], num)]


def _stubs(folder: Path, target: PreTrainedModel) -> None:
    """Programs that a walker installs: `pip` does nothing, and `vllm` is the server of this package."""
    LookaheadDrafter.from_target(target).save_pretrained(folder / "lookahead")
    for name, script in {"pip": "#!/bin/sh\n", "python3": MAKE_ENVIRONMENT, "vllm": SERVE}.items():
        (folder / name).write_text(script, encoding="utf-8")
        (folder / name).chmod(stat.S_IRWXU)
