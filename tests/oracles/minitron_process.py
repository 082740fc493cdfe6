"""A process with ModelOpt 0.35, which NeMo's `prune_language_model` calls, on a CPU; nothing is bridge's.

`python -m tests.oracles.minitron_process STORE JOB OUT`: JOB is a pickle of a family's name, its tensors, batches and
cells; OUT gets, of each cell, the tensors left and the sizes.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import pickle
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.models.megatron_families import EVERY, VOCAB, Family
from tests.oracles import megatron_process

HOME = Path(sys.prefix) / "modelopt-0.35"  # `make oracles` installs it there
SIZES = ("hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "num_layers", "ffn_hidden_size")
Arrays = dict[str, np.ndarray]
FUSED = {  # names of norms in Transformer Engine's linears -> Megatron's own
    ".self_attention.linear_qkv.layer_norm_weight": ".input_layernorm.weight",
    ".mlp.linear_fc1.layer_norm_weight": ".pre_mlp_layernorm.weight",
}
LOCAL = {own: fused for fused, own in FUSED.items()}


def main() -> None:
    store, job, out = sys.argv[1:4]
    start(store)
    Path(out).write_bytes(pickle.dumps([_pruned(*told) for told in pickle.loads(Path(job).read_bytes())]))


def start(store: str) -> None:
    """Join on gloo, and let this ModelOpt import what newer packages have no more."""
    sys.path.insert(0, str(HOME))
    megatron_process.start(0, 1, 1, store)
    gone: Any = types.ModuleType("torch.onnx._globals")
    gone.GLOBALS = types.SimpleNamespace(export_onnx_opset_version=17)
    sys.modules[gone.__name__] = gone
    gather = torch.distributed.all_gather_into_tensor  # gloo wants an axis where NCCL takes a scalar
    torch.distributed.all_gather_into_tensor = lambda out, x, **more: gather(out, x.reshape(-1), **more)

    import modelopt

    assert Path(modelopt.__file__).is_relative_to(HOME) and modelopt.__version__ == "0.35.0"
    importlib.import_module("modelopt.torch.prune")
    from modelopt.torch.nas.modules.norm import _DynamicLayerNorm
    from modelopt.torch.nas.registry import DMRegistry
    from modelopt.torch.nas.traced_hp import TracedHp

    @DMRegistry.register({nn.RMSNorm: "nn.RMSNorm"})  # it knows Apex' and Transformer Engine's
    class _DynamicRMSNorm(_DynamicLayerNorm):  # type: ignore[misc]
        def _setup(self) -> None:
            self._register_hparam("num_features", TracedHp(list(range(1, self.normalized_shape[-1] + 1))))
            self._register_dynamic_attribute("weight", self._cut_to_active_features)
            self._register_dynamic_attribute("normalized_shape", lambda module, _: (module.num_features,))


def _pruned(
    name: str, state: Arrays, batches: Sequence[np.ndarray], cell: Mapping[str, int], right_view: bool
) -> tuple[Arrays, dict[str, Any]]:
    """What is left of one model. `right_view` mends how this ModelOpt reads the scores of heads for their groups."""
    import modelopt.torch.prune as mtp

    def run(model: Any) -> None:
        for ids in batches:
            megatron_process.answer(model, torch.from_numpy(ids))

    every_size = {"hidden_size_divisor": 1, "ffn_hidden_size_divisor": 1}
    with contextlib.redirect_stdout(io.StringIO()), groups(right_view):
        smaller, _ = mtp.prune(
            _model(EVERY[name], state),
            mode=[("mcore_minitron", {"megatron.core.models.gpt.GPTModel": every_size})],
            constraints={"export_config": dict(cell)},
            dummy_input=None,
            config={"forward_loop": run},
        )
    left = {key: tensor.numpy().copy() for key, tensor in smaller.state_dict().items() if "_extra_state" not in key}
    return _renamed(left, LOCAL), {size: getattr(smaller.config, size) for size in SIZES}


@contextlib.contextmanager
def groups(right_view: bool) -> Iterator[None]:
    """A group's score is the norm over its heads, which lie one after the other; as it is, 0.35 takes the groups for
    the inner axis, so that a "group" has a head of each.
    """
    from modelopt.torch.nas.plugins.megatron import _DynamicSelfAttention as Attention

    estimate = Attention._estimate_query_group_importance

    def mended(self: Any) -> torch.Tensor:
        groups = self.get_hparam("num_query_groups").max
        return torch.linalg.vector_norm(self._activations.pow(0.5).view(groups, -1), dim=1)

    if right_view:
        Attention._estimate_query_group_importance = mended
    try:
        yield
    finally:
        Attention._estimate_query_group_importance = estimate


def _model(family: Family, state: Arrays) -> Any:
    """The model with these tensors, of Megatron's own layers."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    fields = family.config | {"activation_func": megatron_process.functions()[family.activation]}
    config = TransformerConfig(**fields | megatron_process.UNFUSED)
    layer = get_gpt_layer_local_spec(normalization=config.normalization)
    model = GPTModel(config, layer, **family.model | {"vocab_size": VOCAB, "parallel_output": False})
    tensors = {key: torch.from_numpy(array) for key, array in _renamed(state, FUSED).items()}
    assert tensors.keys() == {key for key in model.state_dict() if "_extra_state" not in key}
    model.load_state_dict(tensors, strict=False)
    return model.eval()


def _renamed(state: Arrays, names: Mapping[str, str]) -> Arrays:
    def name(key: str) -> str:
        return next((key.replace(old, new) for old, new in names.items() if old in key), key)

    return {name(key): array for key, array in state.items()}


if __name__ == "__main__":
    main()
