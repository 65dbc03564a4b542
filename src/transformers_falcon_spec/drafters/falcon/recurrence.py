"""Falcon's LSTM, which computes in the type of its weights on CPUs, whatever autocast says there."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


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

    def stepwise(
        self, rows: Tensor, state: tuple[Tensor, Tensor], num: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Outputs of `rows` `[rows, tokens, size]`, and the state after the first `num` `[rows, 1]` tokens of each.

        Computed token by token, in shapes that do not depend on `num`. Outputs behind them repeat the last one.
        """
        after: tuple[list[Tensor], list[Tensor]] = ([], [])
        for layer in range(self.num_layers):
            names = ("weight_ih", "bias_ih", "weight_hh", "bias_hh")
            from_input, bias, from_hidden, hidden_bias = (getattr(self, f"{name}_l{layer}") for name in names)
            inputs, outputs = functional.linear(rows.to(from_input.dtype), from_input, bias + hidden_bias), []
            hidden, cell = (part[layer].to(from_input.dtype) for part in state)
            for token in range(rows.shape[1]):
                gates = inputs[:, token] + functional.linear(hidden, from_hidden)
                entry, forget, new, exit_ = gates.chunk(4, dim=-1)
                is_read = token < num
                cell = torch.where(is_read, forget.sigmoid() * cell + entry.sigmoid() * new.tanh(), cell)
                hidden = torch.where(is_read, exit_.sigmoid() * cell.tanh(), hidden)
                outputs.append(hidden)
            rows = torch.stack(outputs, dim=1)
            for states, last in zip(after, (hidden, cell), strict=True):
                states.append(last)
        hidden, cell = (torch.stack(states) for states in after)
        return rows, (hidden, cell)
