"""A transformers model of fake tensors, as its class builds it from the config: a stack of experts alone may be 30 GB.

It is built on the meta device, as transformers does itself: classes name the CPU where they read numbers off a tensor,
such as how likely each layer is dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.initialization import no_init_weights

from bridge.graph.skeleton import build_meta, make_fake
from bridge.graph.tasks import resolve_config
from bridge.sources.loading import model_class

if TYPE_CHECKING:
    from bridge.sources import Source


def build_weightless(source: Source) -> tuple[Any, FakeTensorMode]:
    """Build the model that the source's config names, and return it with the mode of its tensors.

    In the dtype of the checkpoint: a cast that does nothing keeps an object, one that does something makes another.
    """
    sizes = {"bfloat16": 0, "float16": 0, "float32": 0}
    for spec in source.specs.values():
        if spec.dtype in sizes:
            sizes[spec.dtype] += spec.size
    dtype = getattr(torch, max(sizes, key=lambda name: sizes[name]))
    with torch.device("meta"), no_init_weights():
        model = build_meta(resolve_config(dict(source.config)), model_class(source.config), dtype)
    model.tie_weights()
    make_fake(model, mode := FakeTensorMode(allow_non_fake_inputs=True))
    return model, mode
