"""One process of distillations on megatron-core.

The teacher has 5 layers of width 128, the student 4 of width 96; two stages share them 3 + 2 and 2 + 2. `whose`: the
functions of bridge, NeMo's own, or those of ModelOpt's plugin for Megatron-Core, which come from NeMo's. What each case
of the list gave is written to ROOT.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.oracles import megatron_process, nemo_modules

VOCAB, LENGTH, BATCH, STEPS = 97, 16, 2, 4
TEACHER, STUDENT = (128, 5), (96, 4)  # width, layers
STORED = {"non_homogeneous_layers": True}  # how the teacher's checkpoint names layers


def main(rank: int, pp: int, root: Path, cases: list[dict[str, Any]]) -> None:
    """Rank `rank` of `pp` stages: write what each case gave to a file of its own."""
    warnings.simplefilter("ignore")
    for name in ("zeros", "empty", "tensor"):  # the schedules say device="cuda"
        made = getattr(torch, name)
        setattr(torch, name, lambda *a, made=made, device=None, **k: made(*a, **k, device=_here(device)))
    megatron_process.start(rank, 1, pp, str(root / f"store-{pp}"))
    _save_teacher(root / f"teacher-{pp}", pp, rank)
    (root / f"{pp}-{rank}.json").write_text(json.dumps([run(pp, root, told) for told in cases]))


def _here(device: Any) -> Any:
    return None if str(device).startswith("cuda") or device is torch.device("cpu") else device


def _save_teacher(directory: Path, pp: int, rank: int) -> None:
    from megatron.core import dist_checkpointing

    if rank == 0:
        directory.mkdir()
    torch.distributed.barrier()
    sharded = _model(*TEACHER, pp, 1).sharded_state_dict(prefix="module.", metadata=STORED)
    dist_checkpointing.save({"state_dict": sharded}, str(directory), content_metadata=STORED)


def run(pp: int, root: Path, told: dict[str, Any]) -> dict[str, Any]:
    """Losses of some steps on the last stage; shapes that stages exchange; what a checkpoint would hold."""
    import modelopt.torch.distill as mtd

    torch.manual_seed(0)  # of a projection
    doors = _doors(told["whose"])
    given = str(root / "pair.yaml") if told["pair"] else None
    config = doors.load_distillation_config(given, _config(*STUDENT, pp), _config(*TEACHER, pp))
    config.skip_lm_loss = told["skip"]
    config.loss_balancer = type(config.loss_balancer)(1.0, told["skip"])
    # the weights are not those of the checkpoint
    teacher_config = SimpleNamespace(configure_model=lambda tokenizer: _model(*TEACHER, pp, 9))
    teacher = doors.teacher_provider(teacher_config, str(root / f"teacher-{pp}"), tokenizer=None, trainer=_trainer())
    stored = _model(*TEACHER, pp, 1).state_dict()
    assert all(torch.equal(tensor, stored[name]) for name, tensor in teacher.named_parameters())
    losses = {"criterion": config.criterion, "loss_balancer": config.loss_balancer}
    model = mtd.convert(_model(*STUDENT, pp, 2), mode=[("kd_loss", {"teacher_model": teacher, **losses})])
    doors.adjust_distillation_model_for_mcore(model, config)
    model.train()
    shapes_of = doors.get_tensor_shapes_adjust_fn_for_distillation
    with _copied_logits(told["copies"]):
        found = _train(model, shapes_of, pp)
    hidden = sorted(name for name in model.sharded_state_dict() if "teacher" in name)
    adjusted = shapes_of(model, LENGTH, BATCH, None)
    received = [(LENGTH, BATCH, STUDENT[0])]
    sent = list(received)
    widened = adjusted(received, sent) if adjusted else None
    return found | {"teacher": hidden, "shapes": widened and [list(map(list, each)) for each in widened]}


def _doors(whose: str) -> Any:
    """The functions by NeMo's names."""
    if whose == "nemo":
        return nemo_modules.distillation()
    from bridge.compat import nemo_distill

    if whose == "bridge":
        return nemo_distill
    import modelopt.torch.distill.plugins.megatron as plugin

    def shapes_of(model: Any, seq: int, micro: int, *_: Any) -> Any:
        return plugin.get_tensor_shapes_adjust_fn_for_distillation(
            model, seq_length=seq, micro_batch_size=micro, decoder_seq_length=None
        )

    return SimpleNamespace(
        load_distillation_config=plugin.setup_distillation_config, teacher_provider=nemo_distill.teacher_provider,
        adjust_distillation_model_for_mcore=plugin.adjust_distillation_model_for_mcore,
        get_tensor_shapes_adjust_fn_for_distillation=shapes_of,
    )  # fmt: skip


def _trainer() -> Any:
    """What NeMo's strategy has for checkpoints, on Megatron's own functions."""
    from megatron.core import dist_checkpointing

    def load(path: str, wanted: Any, strict: Any) -> Any:
        return dist_checkpointing.load(wanted, path, strict=strict)

    strategy = SimpleNamespace(
        unwrapped_checkpoint_io=SimpleNamespace(load_content_metadata=dist_checkpointing.load_content_metadata),
        checkpoint_io=SimpleNamespace(load_checkpoint=load), ckpt_load_strictness="assume_ok_unexpected",
    )  # fmt: skip
    return SimpleNamespace(strategy=strategy)


@contextlib.contextmanager
def _copied_logits(copies: bool) -> Iterator[None]:
    """`copies`: Megatron's cross entropy works on a copy, so that it does not overwrite what the KL needs."""
    from megatron.core.models.gpt import GPTModel

    compute = GPTModel.compute_language_model_loss
    if copies:
        GPTModel.compute_language_model_loss = lambda self, labels, logits: compute(self, labels, logits.clone())
    try:
        yield
    finally:
        GPTModel.compute_language_model_loss = compute


def _config(width: int, layers: int, pp: int) -> Any:
    from megatron.core.transformer import TransformerConfig

    last = layers // pp
    uneven = {"num_layers_in_first_pipeline_stage": layers - last, "num_layers_in_last_pipeline_stage": last}
    return TransformerConfig(
        num_layers=layers, hidden_size=width, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=width * 2,
        normalization="RMSNorm", add_bias_linear=False, gated_linear_unit=True, hidden_dropout=0.0,
        attention_dropout=0.0, pipeline_model_parallel_size=pp, pipeline_dtype=torch.float32,
        params_dtype=torch.float32, use_cpu_initialization=True, activation_func=torch.nn.functional.silu,
        deallocate_pipeline_outputs=False, **(uneven if layers % pp else {}),
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
    optimizer = torch.optim.SGD([p for name, p in model.named_parameters() if "teacher" not in name], lr=0.1)
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

    for _ in range(STEPS):  # the same two batches, whose losses fall
        generator = torch.Generator().manual_seed(0)
        batches = iter([torch.randint(0, VOCAB, (BATCH, LENGTH), generator=generator) for _ in range(2)])
        more = {"adjust_tensor_shapes_fn": shapes_of(model, LENGTH, BATCH, None)} if pp > 1 else {}
        model.config.no_sync_func = contextlib.nullcontext
        done = get_forward_backward_func()(
            forward_step_func=step, data_iterator=batches, model=model, num_microbatches=2, seq_length=LENGTH,
            micro_batch_size=BATCH, forward_only=False, **more,
        )  # fmt: skip
        losses += [[part["logits_loss"], part["kd_loss"], part["intermediate_loss"]] for part in done]
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses}
