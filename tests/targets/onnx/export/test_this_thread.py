"""What is replaced in modules of transformers, is so for one thread."""

from __future__ import annotations

import threading

import torch
from transformers.models.llava import modeling_llava

from bridge.targets.onnx.export.calls import towers


def test_lists_of_tensors_stay_lists_in_other_threads() -> None:
    class Model:
        __module__ = modeling_llava.__name__

    pair, seen = torch.zeros(2, 3), []
    with towers._whole(Model()):
        replaced = vars(modeling_llava)["list"]
        assert replaced(pair) is pair and replaced((1, 2)) == [1, 2]
        other = threading.Thread(target=lambda: seen.append(replaced(pair)))
        other.start()
        other.join()
    assert isinstance(seen[0], list) and len(seen[0]) == 2
    assert "list" not in vars(modeling_llava)
