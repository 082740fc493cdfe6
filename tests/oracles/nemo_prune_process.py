"""A process in which NeMo's own prune_language_model, on ModelOpt 0.35, and bridge's prune the same live models.

`python -m tests.oracles.nemo_prune_process STORE OUT`.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.oracles import distill_process, megatron_process, minitron_process, nemo_modules

CASES = [  # NeMo takes multiples of 64; the model has hidden 128, ffn 256, 4 heads in 2 groups, 4 layers
    {"target_ffn_hidden_size": 192},
    {"target_hidden_size": 64},
    {"target_num_layers": 3},
    {"target_ffn_hidden_size": 128, "target_hidden_size": 64, "target_num_layers": 2},
    {"target_num_attention_heads": 2, "target_num_query_groups": 1},
    {"target_num_attention_heads": 1, "target_num_query_groups": 1, "target_ffn_hidden_size": 64},
    {"drop_layers": [2, 3]},
]
GENERATOR = torch.Generator().manual_seed(0)
# bridge holds the last one out, to measure with: NeMo gets the others
BATCHES = [torch.randint(0, distill_process.VOCAB, (rows, 16), generator=GENERATOR) for rows in (4, 3, 2)]


def main() -> None:
    minitron_process.start(sys.argv[1])
    nemo = nemo_modules.pruning(_validate)
    Path(sys.argv[2]).write_text(json.dumps([_both(nemo, given) for given in CASES]))


def _validate(model: Any, data: Any, trainer: Any, tokenizer: str) -> None:
    assert tokenizer == "model"
    for ids in data.val_dataloader():
        megatron_process.answer(model, ids)


def _both(nemo: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Names of tensors, those that differ, and fields of the configs that do."""
    from bridge.compat.nemo_prune import PruningConfig, prune_language_model

    ours, theirs = (distill_process._model(128, 4, 1, 1).eval() for _ in range(2))
    prune_language_model(ours, PruningConfig(**given), [{"input_ids": ids} for ids in BATCHES])
    with contextlib.redirect_stdout(io.StringIO()), minitron_process.groups(right_view=True):
        data = SimpleNamespace(train_dataloader=lambda: BATCHES[:-1])
        theirs = nemo.prune_language_model(theirs, nemo.PruningConfig(**given), data, SimpleNamespace())
    made, wanted = (
        {key: tensor for key, tensor in model.state_dict().items() if "_extra_state" not in key}
        for model in (ours, theirs)
    )
    fields = [field for field in minitron_process.SIZES if getattr(ours.config, field) != getattr(theirs.config, field)]
    differing = [key for key in made if key not in wanted or not torch.equal(made[key], wanted[key])]
    return {"tensors": len(made), "missing": sorted(wanted.keys() - made), "differing": differing, "fields": fields}


if __name__ == "__main__":
    main()
