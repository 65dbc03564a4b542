"""The pages are true: their code runs, their commands are those of the command line, their links and figures lead somewhere.

Code runs in a folder that holds what the page's commands would have left there; small local models stand in for those of the Hub
(`tests/docs_folders.py`). A block that cannot run so says why, in a comment above it: `<!-- not run: REASON -->`.
"""

import ast
import dataclasses
import importlib.util
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import transformers_falcon_spec
from tests.docs_folders import make_folder
from tests.test_readme import PAGES, ROOT, blocks
from transformers_falcon_spec import (
    EagleConfig,
    FalconSpecConfig,
    LayerParallelConfig,
    LookaheadConfig,
    MedusaConfig,
    SpeculationConfig,
    cli,
)

pytestmark = pytest.mark.docs

NOT_RUN = {
    ("README.md", "needs the target of `make demo`"): 1,
    ("smollm2.md", "needs the target of `make demo`"): 1,
    ("convert.md", "needs the Hub"): 1,
    ("serving.md", "needs the server"): 1,
}
ELSEWHERE = [
    "results.md",
    "extending.md",
    "qwen3_8b.md",
]  # test_metrics.py in tests/evaluation, test_extending.py and test_walk.py
BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]+) -->\n\n)?```python\n(?P<code>.*?)^```", re.DOTALL | re.MULTILINE
)
QUICK = ["generate"]  # commands of the embedded pair that take seconds
FEWER = {"calibrate": ["--limit", "20"], "trees": ["--limit", "8"]}  # the others say how many prompts themselves
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A block of Python: where its code begins, and why it is not run."""

    code: str
    line: int
    reason: str | None

    @staticmethod
    def of(page: Path) -> "list[Block]":
        text = page.read_text(encoding="utf-8")
        return [
            Block(found["code"], text.count("\n", 0, found.start("code")), found["reason"])
            for found in BLOCK.finditer(text)
        ]


@dataclass(frozen=True)
class Line:
    """A call of `falcon-spec` on a page."""

    page: str
    argv: tuple[str, ...]

    @property
    def command(self) -> str:
        return next(name for name in (" ".join(self.argv[:2]), self.argv[0]) if name in cli.COMMANDS)

    @property
    def is_of_the_embedded_pair(self) -> bool:
        """Whether all that it reads lies in the repository."""
        return "models/reference-target" in self.argv and not any(re.search(r"\b[A-Z]{3}", word) for word in self.argv)

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.argv)}"


def shell_lines(page: Path) -> Iterator[list[str]]:
    """The words of each line of the page's shell blocks, continued lines joined."""
    for block in blocks(page.read_text(encoding="utf-8"), "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            yield shlex.split(line, comments=True)


def lines_of(page: Path) -> list[Line]:
    return [Line(page.name, tuple(words[1:])) for words in shell_lines(page) if words[:1] == ["falcon-spec"]]


def options_of(command: str) -> list[str]:
    """Names of the options of a command of `falcon-spec`."""
    return [name for kind in cli.options_of(command) for name in fields_of(kind)]


def options_of_script(script: Path) -> set[str]:
    """Names of the options that a script takes, those included that a module beside it adds."""
    text = script.read_text(encoding="utf-8")
    for name in re.findall(r"^from (\w+) import", text, flags=re.MULTILINE):
        beside = script.with_name(f"{name}.py")
        text += beside.read_text(encoding="utf-8") if beside.exists() else ""
    found = set(re.findall(r'"--([\w-]+)"', text))
    if script.parent.name == "lab":  # its scripts declare options as commands do
        module = importlib.import_module(f"lab.{script.stem}")
        for kind in filter(dataclasses.is_dataclass, vars(module).values()):
            found |= set(fields_of(kind))
    return found


def fields_of(kind: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


WITH_CODE = [page for page in PAGES if Block.of(page) and page.name not in ELSEWHERE]
LINES = [line for page in PAGES for line in lines_of(page)]
RUNNABLE = [
    line for line in LINES if line.is_of_the_embedded_pair and line.command != "serve" and line.page not in ELSEWHERE
]  # a signal ends `serve`


@pytest.mark.usefixtures("machine_clock")  # as readers run it
@pytest.mark.parametrize(
    "page",
    WITH_CODE,
    ids=lambda page: page.name,
)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_folder(page.name, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path / "assets"))
    names: dict[str, Any] = {"__name__": "__main__"}

    for block in Block.of(page):
        if block.reason is None:
            exec(compile("\n" * block.line + block.code, page.name, "exec"), names)  # noqa: S102  code of this repository


def test_every_block_that_is_not_run_says_why() -> None:
    left_out = Counter((page.name, block.reason) for page in PAGES for block in Block.of(page) if block.reason)

    assert left_out == NOT_RUN
    assert sum(len(Block.of(page)) for page in PAGES) == sum(
        len(blocks(page.read_text(encoding="utf-8"), "python")) for page in PAGES
    )


@pytest.mark.parametrize("line", LINES, ids=str)
def test_a_command_on_a_page_is_one_of_the_command_line(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = import_module(f"transformers_falcon_spec.commands.{line.command}")
    seen: list[Any] = []
    monkeypatch.setattr(module, "run", wraps(module.run)(lambda *options: seen.append(options)))
    if "--save" in line.argv:  # refused before anything is loaded if there is no folder to write into
        make_folder(line.page, tmp_path)
    monkeypatch.chdir(tmp_path)
    argv = list(line.argv)
    if cli.IMPORT in argv:  # of a file of the page
        del argv[argv.index(cli.IMPORT) : argv.index(cli.IMPORT) + 2]

    assert cli.main(argv) == 0
    assert len(seen) == 1


def test_there_are_commands_to_check() -> None:
    assert {line.command for line in LINES} >= set(cli.COMMANDS) - {"find", "fingerprint"}
    assert {line.command for line in RUNNABLE} >= {"generate", "trees", "doctor", "calibrate", "parity"}


@pytest.mark.usefixtures("machine_clock")
@pytest.mark.parametrize(
    "line",
    [pytest.param(line, marks=() if line.command in QUICK else pytest.mark.slow) for line in RUNNABLE],
    ids=str,
)
def test_a_command_of_the_embedded_pair_runs(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_folder(line.page, tmp_path)
    monkeypatch.chdir(tmp_path)

    status = cli.main([*line.argv, *FEWER.get(line.command, [])])

    assert status == 0, capsys.readouterr().err[-3000:]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_options_in_shell_blocks_exist(page: Path) -> None:
    wrong = []
    for words in shell_lines(page):
        wrong += [
            word for word in words if word.startswith(("models/", "benchmarks/", "examples/")) and not _exists(word)
        ]
        if words[:1] == ["python"]:
            script = ROOT / words[1] if words[1] != "-m" else _module(words[2])
            known = options_of_script(script)
            wrong += [word for word in words if word.startswith("--") and word.removeprefix("--") not in known]

    assert not wrong


def _module(name: str) -> Path:
    """The file that `python -m NAME` runs."""
    path = ROOT / name.replace(".", "/")
    return path / "__main__.py" if path.is_dir() else path.with_suffix(".py")


def _exists(name: str) -> bool:
    return any(ROOT.glob(name.rstrip("/")))


OPTIONS_OF = {
    "For generation": SpeculationConfig().__dict__,
    "Of a Falcon drafter": fields_of(FalconSpecConfig),
    "Of an Eagle drafter": fields_of(EagleConfig),
    "Of a Medusa drafter": fields_of(MedusaConfig),
    "Of an EasySpec drafter": ["group_size", *fields_of(LayerParallelConfig)],
    "Of a Lookahead drafter": fields_of(LookaheadConfig),
    "Of the training": options_of("train"),
}


@pytest.mark.parametrize("section", OPTIONS_OF)
def test_every_option_in_a_table_exists(section: str) -> None:
    page = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    text = page.partition(f"\n## {section}\n")[2].partition("\n## ")[0]

    named = [
        name
        for cell in re.findall(r"^\| (`.+?) \|", text, flags=re.MULTILINE)
        for name in re.findall(r"`(\w+)`", cell)
    ]

    assert len(named) > 3
    assert [name for name in named if name not in OPTIONS_OF[section]] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_option_named_in_the_text_is_one_of_a_command_or_a_script(page: Path) -> None:
    known = {name for command in cli.COMMANDS for name in options_of(command)} | {
        "help",
        "help_all",
        "version",
        "nproc_per_node",
        "import",
        "strict",
        "num_phases",
    }  # `strict` of mypy, and once ours, as is `num_phases`
    known |= {f"no_{name}" for name in known}
    for script in [
        *ROOT.glob("benchmarks/**/*.py"),
        *ROOT.glob("lab/*.py"),
        *ROOT.glob("examples/*.py"),
        ROOT / "tests/trials/__main__.py",
    ]:
        known |= options_of_script(script)

    text = page.read_text("utf-8")
    gone = r"^```.*?^```|^### Removed.*?^#|\(was .*?\)"  # blocks of code, and what the changelog says of the past
    named = re.findall(r"`[^`\n]*?--([a-z][\w-]+)", re.sub(gone, "", text, flags=re.DOTALL | re.MULTILINE))

    assert [name for name in named if name not in known] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_to_a_heading_leads_to_one(page: Path) -> None:
    links = LINK.findall(page.read_text(encoding="utf-8"))

    assert [link for link in links if link[1] not in anchors(page.parent / link[0] if link[0] else page)] == []


def anchors(page: Path) -> list[str]:
    """Of the headings of a page, as both MkDocs and GitHub make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in HEADING.findall(text)]


def test_every_page_has_an_entry_in_the_menu_and_every_entry_a_page() -> None:
    menu = re.findall(r"^ *- .+: (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), flags=re.MULTILINE)

    assert sorted(menu) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


def test_the_reference_holds_every_public_name_once() -> None:
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    errors = [
        name for name in transformers_falcon_spec.__all__ if name.endswith("Error")
    ]  # all of them by their module

    named = re.findall(r"^::: transformers_falcon_spec\.(\S+)$", page, flags=re.MULTILINE)

    assert sorted(name for name in named if "." not in name and name != "errors") == sorted(
        set(transformers_falcon_spec.__all__) - set(errors)
    )
    assert "errors" in named
    assert len(named) == len(set(named))


def test_the_reference_holds_what_pages_import() -> None:
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    named = {name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)$", page, flags=re.MULTILINE)}
    trees = [ast.parse(block.code) for path in PAGES for block in Block.of(path)]
    imports = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    ours = {name.name for node in imports if node.module.startswith("transformers_falcon_spec") for name in node.names}

    assert {name for name in ours if not name.isupper()} - named == set()


@pytest.fixture
def figures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("figures", ROOT / "tools" / "figures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_figures_are_what_the_script_draws(figures: ModuleType) -> None:
    drawn = {name: draw() for name, draw in figures.FIGURES.items()}

    assert drawn == {path.name: path.read_text(encoding="utf-8") for path in figures.FOLDER.iterdir()}
