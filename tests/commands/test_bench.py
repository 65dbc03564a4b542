"""`bench` through the command line: targets and methods by name, memory, and failures."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.chat import make_tokenizer, save_target
from tests.tiny import make_drafter
from transformers_falcon_spec import cli
from transformers_falcon_spec.commands.memory import MemoryRun, Peak, peak_resident_bytes
from transformers_falcon_spec.commands.methods import MethodEntry, parse_methods, parse_targets
from transformers_falcon_spec.drafters.compatibility.fingerprint import template_digest
from transformers_falcon_spec.errors import BenchmarkError, DrafterMismatchError, OptionError
from transformers_falcon_spec.evaluation.methods import Method
from transformers_falcon_spec.provenance import portable

pytestmark = pytest.mark.benchmarks

ONE = {"t": "folder"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("pair")
    target = save_target(folder / "target")
    save_target(folder / "other", seed=5)
    make_drafter(AutoModelForCausalLM.from_pretrained(target), block_size=2).save_pretrained(folder / "drafter")
    wide = save_target(folder / "wide", hidden_size=32)
    make_drafter(AutoModelForCausalLM.from_pretrained(wide), block_size=2).save_pretrained(folder / "misfit")
    prompts = folder / "sums.jsonl"
    prompts.write_text('{"id": "a", "prompt": "one plus two"}\n{"id": "b", "prompt": "three"}\n', encoding="utf-8")
    names = ("target", "other", "drafter", "misfit")
    return {"prompts": str(prompts), **{name: str(folder / name) for name in names}}


def bench(folders: dict[str, str], output: Path, *options: str) -> int:
    common = ["bench", "--prompts", folders["prompts"], "--output", str(output), "--max_new_tokens", "6"]
    return cli.main([*common, *options])


def test_bench_measures_every_method_on_its_targets(folders: dict[str, str], tmp_path: Path) -> None:
    output = tmp_path / "speed.json"
    targets = ["--targets", f"small={folders['target']}", f"big={folders['other']}"]
    methods = ["--methods", f"two@small={folders['drafter']}", "prompt-lookup:3"]

    status = bench(folders, output, *targets, *methods, "--memory_texts", "0", "--threads", "1")

    result = json.loads(output.read_text(encoding="utf-8"))
    assert status == 0
    measured = {(row["target"], row["method"], row["decoding"]) for row in result["rows"]}
    pairs = [("small", "two"), ("small", "prompt-lookup:3"), ("big", "prompt-lookup:3")]
    assert measured == {(*pair, decoding) for pair in pairs for decoding in ("greedy", "temperature-0.7")}
    assert all(row["num_identical"] == row["num_compared"] == 2 for row in result["rows"] if row["method"] == "two")
    origin = result["provenance"]
    assert {"command", "commit", "versions", "device", "seed", "threads"} <= set(origin)
    assert origin["threads"] == 1
    assert origin["targets"] == {"small": portable(folders["target"]), "big": portable(folders["other"])}
    assert origin["dtype"] == {"small": "float32", "big": "float32"}
    kinds = {(entry["target"], entry["method"]): entry["kind"] for entry in result["methods"]}
    assert kinds["small", "two"] == "drafter"
    assert kinds["big", "prompt-lookup:3"] == "stock prompt lookup"
    assert kinds["big", "target"] == "target alone"
    conditions = {"revision": None, "template": template_digest(make_tokenizer()), "thinking": None}
    assert all(entry["conditions"] == conditions for entry in result["methods"])


def test_a_method_that_cannot_be_loaded_is_reported_and_the_others_are_measured(
    folders: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output, measure = tmp_path / "speed.json", MemoryRun.measure

    def measured(self: MemoryRun) -> Peak:
        """A process for the method that loads, as starting one takes seconds; how one fails is another test's."""
        if self.source not in (None, "prompt-lookup"):
            raise BenchmarkError("It cannot be loaded.")
        return measure(self) if self.source else self.run_here()

    monkeypatch.setattr(MemoryRun, "measure", measured)
    methods = ["--methods", f"misfit={folders['misfit']}", "prompt-lookup"]
    options = ["--decodings", "greedy", "--limit", "1", "--memory_texts", "1"]

    status = bench(folders, output, "--targets", folders["target"], *methods, *options)

    result = json.loads(output.read_text(encoding="utf-8"))
    failed = {entry["method"]: entry["failure"] for entry in result["methods"] if entry["failure"]}
    assert status == 1
    assert {method: failure["stage"] for method, failure in failed.items()} == {"misfit": "loading"}
    assert failed["misfit"]["error"] == "DrafterMismatchError"
    assert [row["method"] for row in result["rows"]] == ["prompt-lookup"]
    assert "`misfit` on `target` failed while loading" in capsys.readouterr().err
    peaks = {entry["method"]: entry.get("peak_bytes") for entry in result["methods"]}
    assert all(peaks[method] > 50 * 2**20 for method in ("target", "prompt-lookup"))
    assert peaks["misfit"] is None


def test_a_method_that_kills_its_process_is_left_out_and_the_others_are_measured(
    folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, used = MemoryRun.measure, []

    def killed(self: MemoryRun) -> Any:
        if self.source == "prompt-lookup:3":
            monkeypatch.setattr(sys, "executable", str(suicide))
        try:
            return measure(self) if self.source == "prompt-lookup:3" else Peak(1, None, 0)
        finally:
            monkeypatch.setattr(sys, "executable", python)

    python, suicide = sys.executable, tmp_path / "suicide"
    suicide.write_text("#!/bin/sh\nkill -SEGV $$\n", encoding="utf-8")
    suicide.chmod(0o700)
    monkeypatch.setattr(MemoryRun, "measure", killed)
    arguments = Method.arguments
    monkeypatch.setattr(Method, "arguments", lambda self: used.append(self.name) or arguments(self))
    options = ["--methods", "bad=prompt-lookup:3", "prompt-lookup", "--decodings", "greedy", "--limit", "1"]

    status = bench(folders, tmp_path / "x.json", "--targets", folders["target"], *options)

    result = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))
    failures = {entry["method"]: entry["failure"] for entry in result["methods"]}
    assert status == 1
    assert "bad" not in used
    assert [row["method"] for row in result["rows"]] == ["prompt-lookup"]
    assert failures["bad"]["error"] == "ProcessKilledError"
    assert "it ended with the signal SIGSEGV" in failures["bad"]["message"]
    assert failures["target"] is failures["prompt-lookup"] is None


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("folder.json", "`output` must be a file, but `.*folder.json` is a folder"),
        ("runs.json", "`output` must be a file, but `.*runs.jsonl` is a folder"),
        ("file/x.json", "`output` must lie in a folder that can be written to, but `.*file` is none"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_before_anything_runs(
    folders: dict[str, str], tmp_path: Path, output: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "runs.jsonl").mkdir()
    (tmp_path / "file").touch()

    status = bench(folders, tmp_path / output, "--targets", "/nowhere", "--methods", "prompt-lookup")

    assert status == 1
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize("source", ["{}", "a={}", "layer-parallel:2:{}", "trees:{}"])
def test_a_method_that_is_not_there_is_told_before_anything_is_loaded(
    source: str, folders: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    methods = ["prompt-lookup", source.format("/nowhere/at/all")]

    status = bench(folders, tmp_path / "x.json", "--targets", "/no/target", "--methods", *methods)

    assert status == 1
    assert "A method must be a folder, or `OWNER/NAME` on the Hub, but `/nowhere/at/all` is" in capsys.readouterr().err


def test_a_target_that_is_not_there_is_named_without_a_traceback(
    folders: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = bench(folders, tmp_path / "x.json", "--targets", "/nowhere/at/all", "--methods", "prompt-lookup")

    assert status == 1
    assert "/nowhere/at/all" in capsys.readouterr().err


def test_a_folder_is_a_drafter_or_a_stock_assistant_by_its_config(folders: dict[str, str]) -> None:
    target = AutoModelForCausalLM.from_pretrained(folders["target"])

    assert MethodEntry.parse(f"sps={folders['other']}").load(target).kind == "stock assistant"
    assert MethodEntry.parse(folders["drafter"]).load(target).kind == "drafter"
    assert MethodEntry.parse("pld=prompt-lookup:7").load(target).options == {"prompt_lookup_num_tokens": 7}
    with pytest.raises(DrafterMismatchError):
        MethodEntry.parse(folders["misfit"]).load(target)


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("models/falcon/", ("falcon", None, "models/falcon/")),
        ("a=models/falcon", ("a", None, "models/falcon")),
        ("a@t=models/falcon", ("a", "t", "models/falcon")),
        ("prompt-lookup", ("prompt-lookup", None, "prompt-lookup")),
        ("someone/falcon@v2", ("falcon@v2", None, "someone/falcon@v2")),
    ],
)
def test_an_entry_names_method_target_and_source(entry: str, expected: tuple[Any, ...]) -> None:
    found = MethodEntry.parse(entry)

    assert (found.name, found.target, found.source) == expected


@pytest.mark.parametrize("entry", ["", "=", "a=", "a@=x", "@t=x"])
def test_an_entry_that_lacks_a_part_is_refused(entry: str) -> None:
    with pytest.raises(OptionError, match=r"A method must be `SOURCE`, `NAME=SOURCE` or `NAME@TARGET=SOURCE`"):
        MethodEntry.parse(entry)


@pytest.mark.parametrize("source", ["prompt-lookup:", "prompt-lookup:0", "prompt-lookup:x", "prompt-lookup:-1"])
def test_prompt_lookup_of_no_tokens_is_refused(source: str) -> None:
    with pytest.raises(OptionError, match=r"`prompt-lookup:N` needs a whole number above 0"):
        MethodEntry("a", None, source).load(AutoModelForCausalLM)  # type: ignore[arg-type]


def test_targets_are_named_and_a_single_one_needs_no_name() -> None:
    assert parse_targets(["models/x"]) == {"target": "models/x"}
    assert parse_targets(["models/x", "b=models/y"]) == {"x": "models/x", "b": "models/y"}
    with pytest.raises(OptionError, match=r"Each target needs a name of its own"):
        parse_targets(["a/x", "b/x"])


def test_methods_need_a_target_that_is_there_and_a_name_of_their_own() -> None:
    with pytest.raises(OptionError, match=r"`a@u` must name one of the targets \['t'\]"):
        parse_methods(["a@u=x"], ONE)
    with pytest.raises(OptionError, match=r"several are called \['x'\]"):
        parse_methods(["a/x", "b/x"], ONE)
    with pytest.raises(OptionError, match=r"`target` is that of the target alone"):
        parse_methods(["target=x"], ONE)
    assert len(parse_methods(["a@t=x", "a@u=y"], {"t": "", "u": ""})) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--decodings", "hot"], "`decodings` must be some of"),
        (["--max_new_tokens", "1"], "`max_new_tokens` must be at least 2, but it is 1."),
        (["--limit", "0"], "There must be a prompt to answer"),
        (["--output", "x.txt"], "`output` must end in `.json`"),
    ],
)
def test_options_that_no_run_could_serve_are_refused_before_loading(
    folders: dict[str, str], tmp_path: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = bench(folders, tmp_path / "x.json", "--targets", "/nowhere", "--methods", "prompt-lookup", *options)

    assert status == 1
    assert message in capsys.readouterr().err


def test_the_peak_of_a_process_is_its_own_not_its_parents() -> None:
    ballast = bytearray(300 * 2**20)
    ballast[:: 2**12] = b"x" * len(range(0, len(ballast), 2**12))
    code = "from pathlib import Path; print(Path('/proc/self/status').read_text())" if sys.platform == "linux" else ""

    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert peak_resident_bytes() > 300 * 2**20
    if code:
        line = next(line for line in child.splitlines() if line.startswith("VmHWM"))
        assert int(line.split()[1]) * 1024 < 200 * 2**20


def test_a_memory_process_that_fails_says_how(
    folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"  # one that fails at once: the package's own takes seconds to start
    python.write_text("#!/bin/sh\necho Traceback >&2\necho OSError: nowhere >&2\nexit 1\n", encoding="utf-8")
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))

    with pytest.raises(
        BenchmarkError,
        match=r"the memory of `the target alone` must end with 0, but it ended with 1: OSError: nowhere",
    ):
        MemoryRun("/nowhere/at/all", None, [folders["prompts"]], 1).measure()
