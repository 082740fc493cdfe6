"""Mean squares of inputs by plain hooks on a transformers model; experts are computed from the router's choice.

Nothing of `bridge.calibration` is used: names are those of the checkpoint, written here by hand.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from transformers.pytorch_utils import Conv1D


def importance_of(model: Any, batches: Iterable[Mapping[str, torch.Tensor]]) -> dict[str, np.ndarray]:
    """Checkpoint module -> mean of x^2 by `in`, float64, of all matrices but head and routers."""
    sums: dict[str, Any] = defaultdict(float)
    tokens: dict[str, int] = defaultdict(int)

    def note(name: str, x: torch.Tensor) -> None:
        rows = x.detach().double().reshape(-1, x.shape[-1])
        sums[name] = sums[name] + (rows**2).sum(0)
        tokens[name] += len(rows)

    def experts(name: str) -> Any:
        def hook(module: Any, args: Any, kwargs: Any) -> None:
            hidden, chosen, *_ = (*args, *kwargs.values())
            hidden = hidden.reshape(-1, hidden.shape[-1])
            mixtral = "block_sparse_moe" in name
            gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
            for number in range(len(module.gate_up_proj)):
                x = hidden[torch.where((chosen == number).T)[1]]  # rows in transformers' order: the same last bits
                if len(x):
                    note(f"{name}.{number}.{gate}", x)
                    note(f"{name}.{number}.{up}", x)
                    first, second = torch.nn.functional.linear(x, module.gate_up_proj[number]).chunk(2, -1)
                    note(f"{name}.{number}.{down}", module.act_fn(first) * second)

        return hook

    handles = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear | Conv1D) and not re.search(r"(lm_head|\.gate)$", name):
            handles.append(module.register_forward_hook(lambda _, args, out, name=name: note(name, args[0])))
        elif name.endswith(".experts"):
            stored = name.replace(".mlp.", ".block_sparse_moe.") if model.config.model_type == "mixtral" else name
            handles.append(module.register_forward_pre_hook(experts(stored), with_kwargs=True))
    with torch.no_grad():
        for batch in batches:
            model(**batch)
    for handle in handles:
        handle.remove()
    return {name: (total / tokens[name]).numpy() for name, total in sums.items()}
