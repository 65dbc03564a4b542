"""Arguments for the chat template: given to every command alike, recorded, and refused where the template does not know them."""

import json
import logging
from pathlib import Path

import pytest

from tests.chat import PLAIN_TEMPLATE, make_rows, make_tokenizer, save_target, write_rows
from tests.chat_server import chat_server
from tests.training.runs import SMALL
from transformers_falcon_spec import FalconSpecDrafter, cli

OFF = ["--chat_template_kwargs", '{"enable_thinking": false}']
SWITCHED = PLAIN_TEMPLATE.replace(  # earlier answers are shortened, as thoughts are
    "{{ message['content'] }}",
    "{{ message['content'] if loop.last or message['role'] != 'assistant' else 'two' }}",
).replace(
    "<assistant>{% endif %}",
    "<assistant>{% if enable_thinking is defined and not enable_thinking %}two {% endif %}{% endif %}",
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A target whose template has a switch, conversations of one and of two turns, prompts, and a drafter trained with the switch off."""
    folder = tmp_path_factory.mktemp("files")
    target = save_target(folder / "target", **SMALL)
    make_tokenizer(SWITCHED).save_pretrained(target)
    rows = [first + second for first, second in zip(make_rows(4), make_rows(4, seed=1), strict=True)]
    data = write_rows(folder / "data.jsonl", [*rows, *make_rows(6, seed=2)])
    with data.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"messages": [{"role": "tool", "content": "a"}]}) + "\n")
    prompts = folder / "sums.jsonl"
    prompts.write_text('{"id": "a", "prompt": "one plus two"}\n', encoding="utf-8")
    found = {"target": str(target), "data": str(data), "prompts": str(prompts), "drafter": str(folder / "drafter")}
    options = ["--output_dir", found["drafter"], "--max_steps", "2", "--use_cpu", "--report_to", "none"]
    assert cli.main(["train", "--target", found["target"], "--data", found["data"], *options, *OFF]) == 0
    return found


def test_training_records_the_arguments_and_the_rows_by_treatment(files: dict[str, str]) -> None:
    record = json.loads((Path(files["drafter"]) / "training.json").read_text(encoding="utf-8"))

    assert record["rows"] == {"as written": 10, "an unknown role": 1}
    assert record["num_examples"] == 14
    assert record["template_kwargs"] == {"enable_thinking": False}
    config = FalconSpecDrafter.from_pretrained(files["drafter"]).config
    assert config.target_fingerprint["template_kwargs"] == {"enable_thinking": False}


def test_rows_by_treatment_are_told_and_the_switch_is_asked_for(
    files: dict[str, str], caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO):
        status = cli.main(["train", "--target", files["target"], "--data", files["data"], "--show_masks", "12"])

    assert status == 0
    assert "11 rows: 6 whole (55%), 4 turn by turn (36%), 1 left out (9%: 1 an unknown role)." in caplog.text
    assert caplog.text.count("The chat template has a switch `enable_thinking`, which was not given") == 1
    assert "line 1, answer 2: " in capsys.readouterr().out


def test_generate_says_what_the_drafter_was_trained_with(
    files: dict[str, str], caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["generate", "--target", files["target"], "--drafter", files["drafter"], "--prompt", "one plus"]
    command += ["--max_new_tokens", "4", "--dtype", "float32"]

    assert cli.main([*command, *OFF]) == 0
    assert "chat template" not in caplog.text
    assert cli.main(command) == 0
    assert 'was trained with {"enable_thinking": false}' in caplog.text


def test_parity_and_bench_ask_with_the_arguments(files: dict[str, str], tmp_path: Path) -> None:
    texts = ["--prompts", files["prompts"], "--max_new_tokens", "4", *OFF]
    parity, speed = tmp_path / "parity.json", tmp_path / "speed.json"
    pair = ["--target", files["target"], "--drafter", files["drafter"]]

    assert cli.main(["parity", *pair, *texts, "--output", str(parity)]) == 0
    bench = ["--target", files["target"], "--methods", files["drafter"], "--decodings", "greedy"]
    assert cli.main(["bench", *bench, *texts, "--output", str(speed)]) == 0

    settings = json.loads(parity.with_suffix(".jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert settings["settings"]["template_kwargs"] == {"enable_thinking": False}
    (conditions,) = {str(method["conditions"]) for method in json.loads(speed.read_text(encoding="utf-8"))["methods"]}
    assert "'template_kwargs': {'enable_thinking': False}" in conditions


def test_a_server_answers_in_place_of_the_target(
    files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    output = tmp_path / "out.jsonl"
    with chat_server() as server:
        command = ["regenerate", "--target", files["target"], "--data", files["data"], "--output", str(output), *OFF]
        status = cli.main([*command, "--endpoint", server.url, "--endpoint_model", "served", "--concurrency", "2"])

    assert status == 0
    assert f"10 conversations in {output}" in capsys.readouterr().out
    assert {request["model"] for request in server.requests} == {"served"}
    assert all(request["chat_template_kwargs"] == {"enable_thinking": False} for request in server.requests)
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer sk-secret"}
    assert all("sk-secret" not in path.read_text(encoding="utf-8") for path in tmp_path.iterdir())


@pytest.mark.parametrize("command", ["train", "regenerate", "generate", "parity", "bench"])
@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ('{"thinking": true}', "it does not read `thinking`"),
        ("no JSON", "`--chat_template_kwargs` must be a JSON object such as"),
        ("[1]", "but it is '[1]'"),
        ("[]", "but it is '[]'"),
    ],
)
def test_what_the_template_does_not_take_is_refused_by_every_command(
    command: str, kwargs: str, text: str, files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = ["--target", files["target"], "--drafter", files["drafter"]]
    out = ["--output", str(tmp_path / "out.json")]
    options = {
        "train": ["--target", files["target"], "--data", files["data"], "--output_dir", str(tmp_path)],
        "regenerate": ["--target", files["target"], "--data", files["data"], *out],
        "generate": [*pair, "--prompt", "one"],
        "parity": [*pair, "--prompts", files["prompts"], *out],
        "bench": ["--target", files["target"], "--methods", files["drafter"], "--prompts", files["prompts"], *out],
    }

    status = cli.main([command, *options[command], "--chat_template_kwargs", kwargs])

    assert status == 1
    assert text in capsys.readouterr().err
