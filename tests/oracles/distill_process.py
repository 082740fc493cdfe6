"""One process of a distillation on megatron-core: `python -m tests.oracles.distill_process RANK PP STORE OUT CASE`.

The teacher has 4 layers of width 128, the student 2 of width 96. `whose`: the functions of bridge, or those of
ModelOpt's plugin for Megatron-Core, which come from NeMo's.
"""

from __future__ import annotations

import json
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from tests.oracles import megatron_process

VOCAB, LENGTH, BATCH, STEPS = 97, 16, 2, 4


def main() -> None:
    rank, pp, store, out, case = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6]
    told = json.loads(case)
    warnings.simplefilter("ignore")
    for name in ("zeros", "empty", "tensor"):  # the schedules say device="cuda"
        made = getattr(torch, name)
        setattr(torch, name, lambda *a, made=made, device=None, **k: made(*a, **k, device=_here(device)))
    megatron_process.start(rank, 1, pp, store)
    Path(out).write_text(json.dumps(run(pp, told)))


def _here(device: Any) -> Any:
    return None if str(device).startswith("cuda") or device is torch.device("cpu") else device


def run(pp: int, told: dict[str, Any]) -> dict[str, Any]:
    """Losses of some steps on the last stage; shapes that stages exchange; what a checkpoint would hold."""
    import modelopt.torch.distill as mtd
    from megatron.core import parallel_state

    torch.manual_seed(0)  # of a projection
    if told["whose"] == "bridge":
        from bridge.api import nemo_distill as doors

        config = doors.load_distillation_config(told.get("yaml"), _config(96, 2, pp), _config(128, 4, pp))
        adjust, shapes_of = (
            doors.adjust_distillation_model_for_mcore,
            doors.get_tensor_shapes_adjust_fn_for_distillation,
        )
    else:
        import modelopt.torch.distill.plugins.megatron as plugin

        config = plugin.setup_distillation_config(told.get("yaml"), _config(96, 2, pp), _config(128, 4, pp))
        adjust = plugin.adjust_distillation_model_for_mcore

        def shapes_of(model: Any, seq: int, micro: int, *_: Any) -> Any:
            return plugin.get_tensor_shapes_adjust_fn_for_distillation(
                model, seq_length=seq, micro_batch_size=micro, decoder_seq_length=None
            )

    config.skip_lm_loss = told["skip"]
    config.loss_balancer = type(config.loss_balancer)(1.0, told["skip"])
    teacher, student = _model(128, 4, pp, 1), _model(96, 2, pp, 2)
    losses = {"criterion": config.criterion, "loss_balancer": config.loss_balancer}
    model = mtd.convert(student, mode=[("kd_loss", {"teacher_model": teacher, **losses})])
    adjust(model, config)
    model.train()
    found = _train(model, shapes_of, pp)
    hidden = sorted(name for name in model.sharded_state_dict() if "teacher" in name)
    adjusted = shapes_of(model, LENGTH, BATCH, None)
    received = [(LENGTH, BATCH, 96)]
    sent = list(received)
    widened = adjusted(received, sent) if adjusted else None
    found |= {"teacher": hidden, "shapes": None if widened is None else [list(map(list, each)) for each in widened]}
    model.eval()
    found["last"] = parallel_state.is_pipeline_last_stage()
    return found


def _config(width: int, layers: int, pp: int) -> Any:
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=layers, hidden_size=width, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=width * 2,
        normalization="RMSNorm", add_bias_linear=False, gated_linear_unit=True, hidden_dropout=0.0,
        attention_dropout=0.0, pipeline_model_parallel_size=pp, pipeline_dtype=torch.float32,
        params_dtype=torch.float32, use_cpu_initialization=True, activation_func=torch.nn.functional.silu,
        deallocate_pipeline_outputs=False,
    )  # fmt: skip


def _model(width: int, layers: int, pp: int, seed: int) -> Any:
    """One stage of a model whose weights follow from their names in the whole one."""
    from megatron.core import parallel_state
    from megatron.core.enums import ModelType
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerLayer

    config = _config(width, layers, pp)
    model = GPTModel(
        config, get_gpt_layer_local_spec(normalization="RMSNorm"), VOCAB, LENGTH, position_embedding_type="rope",
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False, parallel_output=True,
    )  # fmt: skip
    model.model_type = ModelType.encoder_or_decoder
    first = TransformerLayer._get_layer_offset(config)
    with torch.no_grad():
        for name, param in model.named_parameters():
            parts = name.split(".")
            if "layers" in parts:
                at = parts.index("layers") + 1
                parts[at] = str(int(parts[at]) + first)
            generator = torch.Generator().manual_seed(seed * 1000 + sum(map(ord, ".".join(parts))) % 997)
            if param.ndim > 1:
                param.copy_(torch.randn(param.shape, generator=generator) * 0.08)
    return model


def _train(model: Any, shapes_of: Any, pp: int) -> dict[str, Any]:
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    mask = torch.ones(BATCH, LENGTH)
    positions = torch.arange(LENGTH).expand(BATCH, -1)
    optimizer = torch.optim.SGD([p for name, p in model.named_parameters() if "teacher" not in name], lr=0.3)
    losses: list[list[float]] = []

    def masked(loss: Any) -> Any:
        values = loss[0] if isinstance(loss, tuple) else loss
        return (values.float() * mask).sum() / mask.sum()

    def step(batches: Any, model: Any, *_: Any) -> Any:
        ids = next(batches)
        out = model(ids, positions, None, labels=ids.roll(-1, 1))

        def reduce(output: Any) -> Any:
            parts = model.compute_kd_loss(student_loss=masked(output), loss_reduction_fn=masked)
            return parts["kd_loss"], {name: float(loss.detach()) for name, loss in parts.items()}

        return out, reduce

    for number in range(STEPS):
        generator = torch.Generator().manual_seed(number)
        batches = iter([torch.randint(0, VOCAB, (BATCH, LENGTH), generator=generator) for _ in range(2)])
        more = {"adjust_tensor_shapes_fn": shapes_of(model, LENGTH, BATCH, None)} if pp > 1 else {}
        model.config.no_sync_func = nullcontext
        done = get_forward_backward_func()(
            forward_step_func=step, data_iterator=batches, model=model, num_microbatches=2, seq_length=LENGTH,
            micro_batch_size=BATCH, forward_only=False, **more,
        )  # fmt: skip
        losses += [[part["logits_loss"], part["kd_loss"], part["intermediate_loss"]] for part in done]
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses}


if __name__ == "__main__":
    main()
