"""Files of work that is done piece by piece: they go on where they stopped, and no other file is taken for one."""

from pathlib import Path

import pytest

from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.records import Records

BEGUN = '{"settings": {"seed": 0}}\n{"a": 1}\n'


@pytest.mark.parametrize(
    "content",
    [
        '{"id": "a", "prompt": "One?"}\n{"id": "b", "prompt": "Two?"}',
        '{"id": "a", "prompt": "One?"}',
        '[{"role": "user", "content": "One?"}]\n',
        "\n",
    ],
)
def test_a_file_of_something_else_is_refused_and_stays_as_it_is(tmp_path: Path, content: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content, encoding="utf-8")

    with pytest.raises(OptionError, match="holds something else"):
        Records(file, {"seed": 0})

    assert file.read_text(encoding="utf-8") == content


@pytest.mark.parametrize("num_written", range(len(BEGUN)))
def test_wherever_writing_stopped_the_file_goes_on(tmp_path: Path, num_written: int) -> None:
    file = tmp_path / "found.jsonl"
    file.write_text(BEGUN[:num_written], encoding="utf-8")

    records = Records(file, {"seed": 0})
    assert records.entries == []
    records.append({"a": 1})

    assert file.read_text(encoding="utf-8") == BEGUN


@pytest.mark.parametrize("line", ['{"a": ', "\0\0\0\0"])
def test_a_line_that_a_crash_left_broken_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "found.jsonl"
    file.write_text(f"{BEGUN}{line}\n{BEGUN}", encoding="utf-8")

    with pytest.raises(OptionError, match="line 3 is not: "):
        Records(file, {"seed": 0})
