"""Falcon's LSTM, which computes in the type of its weights on CPUs, whatever autocast says there."""

from typing import Any

import torch
from torch import nn


class Recurrence(nn.LSTM):
    """An LSTM with the weights and results of `nn.LSTM`, and on CPUs out of autocast's reach.

    Under bfloat16 autocast oneDNN would be asked for an LSTM in bfloat16, which it refuses on processors without such
    instructions (AVX512-BF16, AMX).
    """

    def forward(self, rows: Any, state: Any = None) -> Any:
        """Outputs and the state after the last of `rows`, which may be packed, from `state` on."""
        weight = self.weight_ih_l0
        if weight.device.type != "cpu" or not torch.is_autocast_enabled("cpu"):
            return super().forward(rows, state)
        with torch.autocast("cpu", enabled=False):
            state = state and tuple(part.to(weight.dtype) for part in state)
            return super().forward(rows.to(weight.dtype), state)
