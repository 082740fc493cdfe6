"""Batches for walks of tiny models: all but one to calibrate with, one of them padded, and one that is held out."""

from __future__ import annotations

from typing import Any

import torch


def batches(decoder: bool = False, count: int = 4) -> list[dict[str, Any]]:
    """Ids of a vocabulary of 97; a row of the second batch is padded on the left. `decoder`: with its inputs, too."""
    random = torch.Generator().manual_seed(7)
    made = []
    for at in range(count):
        ids = torch.randint(3, 97, (2, 24), generator=random)
        mask = torch.ones_like(ids)
        mask[0, : 5 * (at == 1)] = 0
        more = {"decoder_input_ids": torch.randint(3, 97, (2, 12), generator=random)} if decoder else {}
        made.append({"input_ids": ids, "attention_mask": mask, **more})
    return made
