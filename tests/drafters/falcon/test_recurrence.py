"""The LSTM under autocast on CPUs: in the type of its weights, so that processors without instructions for bfloat16 decode and train."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny import make_drafter, make_target
from transformers_falcon_spec.drafters.falcon import Recurrence

ROOT = Path(__file__).parents[3]
NOT_REFUSED = 3  # exit status where LSTMs in bfloat16 run nevertheless, so that nothing is tried
OLD_PROCESSOR = {"ONEDNN_MAX_CPU_ISA": "AVX2"}  # what oneDNN is allowed; read when Python starts


def recurred(drafter: Any, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs and both states of two passes, the second from the state that the first left."""
    first, state = drafter.recur(rows, None)
    second, (hidden, cell) = drafter.recur(rows, state)
    return torch.cat([first, second]), hidden, cell


@torch.no_grad()
def test_under_autocast_the_recurrence_gives_what_it_gives_without() -> None:
    drafter = make_drafter(make_target(), shortcut=False, recurrence="sequence")
    rows = torch.randn(2, 4, drafter.recurrence.input_size)

    expected = recurred(drafter, rows)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        given = recurred(drafter, rows)

    for part, same_part in zip(expected, given, strict=True):
        assert same_part.dtype == torch.float32
        assert same_part.equal(part)


@torch.no_grad()
def test_under_autocast_rows_that_come_in_half_precision_are_read() -> None:
    drafter = make_drafter(make_target(), shortcut=False, recurrence="sequence")
    rows = torch.randn(2, 4, drafter.recurrence.input_size).bfloat16()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        given = drafter.recurrence(rows)[0]

    assert given.equal(drafter.recurrence(rows.float())[0])


def test_it_is_an_lstm_with_the_weights_of_one() -> None:
    ours, stock = Recurrence(4, 3, num_layers=2), torch.nn.LSTM(4, 3, num_layers=2)

    assert isinstance(ours, torch.nn.LSTM)
    assert {name: weight.shape for name, weight in ours.state_dict().items()} == {
        name: weight.shape for name, weight in stock.state_dict().items()
    }


@torch.no_grad()
@pytest.mark.parametrize("num_layers", [1, 2])
def test_token_by_token_the_state_after_some_of_the_rows_is_that_of_reading_them_alone(num_layers: int) -> None:
    lstm = Recurrence(4, 3, num_layers=num_layers, batch_first=True).double()
    rows, num = torch.randn(4, 5, 4, dtype=torch.double), [0, 1, 4, 5]
    state = (torch.randn(num_layers, 4, 3, dtype=torch.double), torch.randn(num_layers, 4, 3, dtype=torch.double))

    outputs, after = lstm.stepwise(rows, state, torch.tensor(num)[:, None])

    for row, length in enumerate(num):
        before = tuple(part[:, row : row + 1].contiguous() for part in state)
        alone, alone_after = lstm(rows[row : row + 1, :length], before) if length else (rows[:1, :0, :3], before)
        torch.testing.assert_close(outputs[row, :length], alone[0])
        for part, alone_part in zip(after, alone_after, strict=True):
            torch.testing.assert_close(part[:, row], alone_part[:, 0])


SCRIPT = """
import sys
from pathlib import Path
import torch
from tests.tiny import make_drafter, make_prompt, make_target
from tests.training.runs import make_trainer

refused = False
with torch.autocast("cpu", dtype=torch.bfloat16):
    try:
        torch.nn.LSTM(4, 4)(torch.zeros(1, 1, 4))
    except RuntimeError:
        refused = True
if not refused:
    sys.exit(3)

target = make_target()
prompts = torch.cat([make_prompt(12, 0), make_prompt(12, 1)])
mask = torch.ones_like(prompts)
mask[1, :5] = 0
for dtype in (torch.float32, torch.bfloat16):
    drafter = make_drafter(target, block_size=2).to(dtype)
    drafter.generation_config.tune = False
    with torch.autocast("cpu", dtype=torch.bfloat16):
        options = dict(attention_mask=mask, assistant_model=drafter, max_new_tokens=12, return_dict_in_generate=True)
        assert target.generate(prompts, **options).speculation.num_drafted > 0
    drafter(torch.zeros(1, 4, 64), torch.zeros(1, 4, 64), phases=torch.zeros(1, dtype=torch.long))

trainer = make_trainer(Path(sys.argv[1]), {"block_size": 2, "recurrence": "sequence"}, bf16=True, max_steps=2)
trainer.train()
"""


@pytest.mark.training
def test_a_processor_without_bfloat16_decodes_and_trains_under_autocast(tmp_path: Path) -> None:
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, **OLD_PROCESSOR, "PYTHONPATH": os.pathsep.join(paths)}

    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], env=environment, capture_output=True, text=True, check=False
    )

    if done.returncode == NOT_REFUSED:
        pytest.skip("oneDNN computes LSTMs in bfloat16 here, whatever it is allowed")
    assert done.returncode == 0, done.stderr[-2000:]
