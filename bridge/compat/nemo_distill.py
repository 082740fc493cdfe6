"""NeMo's functions for distillation with ModelOpt on Megatron-Core, under their names.

Intended differences from NeMo:

- A student that is quantized may be distilled: the last of several ModelOpt modes must be `kd_loss`.
- Float32 logits are copied before Megatron's cross entropy overwrites them: NeMo computes the KL on what is left.
- Only a leading `module.` is taken off the names of the teacher's tensors.
- Losses of zero are not divided by.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import MethodType
from typing import Any

from bridge.core.errors import UsageError, warn

__all__ = [
    "DistillationConfig", "adjust_distillation_model_for_mcore", "get_tensor_shapes_adjust_fn_for_distillation",
    "load_distillation_config", "teacher_provider",
]  # fmt: skip

MODEL = "DistillationModel"  # ModelOpt's class
Shapes = list[tuple[int, ...]]


@dataclass
class DistillationConfig:
    """Names of layers whose outputs are compared, student's first, and how losses are weighed.

    `criterion`: layer pair -> its loss, on the last pipeline stage; `loss_balancer` makes one loss of them.
    """

    intermediate_layer_pairs: list[tuple[str, str]] = field(default_factory=list)
    logit_layers: tuple[str, str] = ("output_layer", "output_layer")
    skip_lm_loss: bool = True
    kd_loss_scale: float = 1.0
    criterion: dict[tuple[str, str], Any] | None = None
    loss_balancer: Any = None

    def __post_init__(self) -> None:
        pairs = [tuple(self.logit_layers), *map(tuple, self.intermediate_layer_pairs)]
        assert all(len(pair) == 2 for pair in pairs), f"layers come in pairs of two names, student's first: {pairs}"
        assert self.kd_loss_scale > 0, f"kd_loss_scale={self.kd_loss_scale}: expected a number above 0"


def load_distillation_config(config_path: str | Path | None, student_cfg: Any, teacher_cfg: Any) -> DistillationConfig:
    """Read a YAML file of `DistillationConfig`'s fields, and make the losses of this pipeline stage.

    Args:
        config_path: None compares logits only.
        student_cfg, teacher_cfg: Megatron-Core's TransformerConfig of both models.

    Raises:
        UsageError: the file is no mapping of known fields; also an OSError (FileNotFoundError), a TypeError or a
            YAMLError, which NeMo raises.
        ValueError: a layer is not on the last pipeline stage.
    """
    from megatron.core import parallel_state

    from bridge.calibration.modelopt import part
    from bridge.compat.nemo_losses import HiddenStateCosineLoss, LogitsKLLoss, LossBalancer, Projection

    config = _read(Path(config_path)) if config_path else DistillationConfig()
    if not config_path:
        warn("no distillation config was given: only logits are compared")
    config.criterion = {}
    if student_cfg.pipeline_model_parallel_size == 1 or parallel_state.is_pipeline_last_stage():
        student, teacher = config.logit_layers
        config.criterion[student, teacher] = LogitsKLLoss(student_cfg)
        projection = Projection(student_cfg, teacher_cfg)  # one for all pairs
        for student, teacher in config.intermediate_layer_pairs:
            pair = _on_this_stage(student, student_cfg), _on_this_stage(teacher, teacher_cfg)
            config.criterion[pair] = HiddenStateCosineLoss(student_cfg, projection)
    # ModelOpt takes subclasses of its own class only
    kind = type(LossBalancer.__name__, (LossBalancer, part("torch.distill").DistillationLossBalancer), {})
    config.loss_balancer = kind(config.kd_loss_scale, config.skip_lm_loss)
    return config


def teacher_provider(config: Any, ckpt_path: str, tokenizer: Any, trainer: Any) -> Any:
    """Build a teacher from its NeMo config, and load its weights by the trainer's checkpoint IO.

    A function of a module, so that ModelOpt can pickle it. `strict` follows the strategy's `ckpt_load_strictness`.
    """
    import torch
    from megatron.core.dist_checkpointing.validation import StrictHandling, parse_strict_flag

    model, strategy = config.configure_model(tokenizer), trainer.strategy
    metadata = strategy.unwrapped_checkpoint_io.load_content_metadata(ckpt_path)
    wanted = {"state_dict": model.sharded_state_dict(prefix="module.", metadata=metadata)}
    strict = strategy.ckpt_load_strictness
    loaded = strategy.checkpoint_io.load_checkpoint(ckpt_path, wanted, strict=strict)["state_dict"]
    if strict is not None and not isinstance(strict, bool):
        raising = (StrictHandling.ASSUME_OK_UNEXPECTED, StrictHandling.RAISE_UNEXPECTED, StrictHandling.RAISE_ALL)
        strict = parse_strict_flag(strict) in raising
    model.load_state_dict({name.removeprefix("module."): tensor for name, tensor in loaded.items()}, strict=strict)
    torch.cuda.empty_cache()
    return model


def adjust_distillation_model_for_mcore(model: Any, distill_cfg: DistillationConfig) -> None:
    """Bind to ModelOpt's DistillationModel what Megatron-Core's loss, checkpoints and pipelines need.

    The teacher is in no checkpoint and has no loss of its own; in a pipeline its activations travel behind the
    student's.

    Raises:
        AssertionError: the model was converted by another mode of ModelOpt after `kd_loss`.
    """
    from bridge.calibration.modelopt import part

    states = part("torch.opt").ModeloptStateManager
    state = states(model).state_dict()
    modes = [name for name, _ in state]
    assert modes and modes[-1] == "kd_loss", f"ModelOpt's last mode of the student must be kd_loss, not {modes}"
    if len(modes) == 1:  # its losses cannot be pickled
        states.remove_state(model)
    else:
        state.pop()  # the state of a quantizer must stay
    teacher = model.teacher_model
    bound: dict[str, Callable[..., Any]] = {
        "sharded_state_dict": _without_teacher,
        "compute_language_model_loss": _loss_of(distill_cfg.skip_lm_loss),
        "set_student_input_tensor_shape": _set_split,
        "set_input_tensor": _set_inputs,
        "forward": _both_forward,
    }
    for name, function in bound.items():
        setattr(model, name, MethodType(function, model))
    teacher.compute_language_model_loss = MethodType(_no_loss, teacher)


def get_tensor_shapes_adjust_fn_for_distillation(
    model: Any,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
) -> Callable[[Shapes, Shapes], tuple[Shapes, Shapes]] | None:
    """Return what adds the teacher's width to the shapes that pipeline stages exchange; None where nothing is added.

    Nothing is added without a pipeline, in an interleaved one, in evaluation, and for a model that distills nothing.
    """
    from megatron.core import parallel_state as ranks

    whole = ranks.get_pipeline_model_parallel_world_size() == 1
    if forward_only or whole or ranks.get_virtual_pipeline_model_parallel_world_size() is not None:
        return None
    model = model[0] if isinstance(model, list) else model
    while hasattr(model, "module"):
        model = model.module
    if not any(kind.__name__ == MODEL for kind in type(model).__mro__):
        return None

    def adjust(recv_tensor_shapes: Shapes, send_tensor_shapes: Shapes) -> tuple[Shapes, Shapes]:
        from megatron.core.pipeline_parallel.schedules import get_tensor_shapes
        from megatron.core.utils import get_model_config

        (shape, *_) = get_tensor_shapes(
            seq_length=seq_length, micro_batch_size=micro_batch_size, decoder_seq_length=decoder_seq_length,
            config=get_model_config(model.teacher_model), tp_group=ranks.get_tensor_model_parallel_group(),
            cp_group=ranks.get_context_parallel_group(),
        )  # fmt: skip
        model.set_student_input_tensor_shape(recv_tensor_shapes)  # where the student's part ends
        for shapes in (recv_tensor_shapes, send_tensor_shapes):
            shapes[:] = [(*own[:-1], own[-1] + shape[-1]) for own in shapes]
        return recv_tensor_shapes, send_tensor_shapes

    return adjust


def _read(path: Path) -> DistillationConfig:
    """The config whose fields a YAML file has."""
    import yaml

    try:
        told = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(told, dict):
            raise TypeError(f"it holds {type(told).__name__}, no fields")
        return DistillationConfig(**told)
    except (OSError, TypeError, ValueError, yaml.YAMLError) as error:
        kind = next((base for base in (yaml.YAMLError, TypeError, ValueError) if isinstance(error, base)), type(error))
        both: Any = type("DistillationConfigError", (UsageError, kind), {})  # NeMo's users catch the latter
        raise both(f"{path}: no distillation config can be read from it: {error}") from error


def _on_this_stage(name: str, config: Any) -> str:
    """A layer's name with the number that it has on this pipeline stage."""
    from megatron.core.transformer import TransformerLayer

    number = re.search(r"(?<=\.)\d+(?=\.|$)", name)
    if not number:
        return name
    own = int(number[0]) - TransformerLayer._get_layer_offset(config)
    if own < 0:
        raise ValueError(f"layer {name} is not on the last pipeline stage, where losses are computed")
    return name[: number.start()] + str(own) + name[number.end() :]


def _without_teacher(self: Any, *args: Any, **kwargs: Any) -> Any:
    with self.hide_teacher_model():
        return type(self).sharded_state_dict(self, *args, **kwargs)


def _loss_of(skip: bool) -> Callable[..., Any]:
    def compute(self: Any, labels: Any, logits: Any) -> Any:
        if skip and self.training:
            return _no_loss(self, labels, logits)
        # Megatron's cross entropy works in place on float32 logits, which the KL still needs
        own = logits.clone() if str(logits.dtype) == "torch.float32" else logits
        return type(self).compute_language_model_loss(self, labels, own)

    return compute


def _no_loss(_: Any, labels: Any, logits: Any) -> Any:
    import torch

    return torch.zeros_like(labels, dtype=logits.dtype)


def _set_split(self: Any, shapes: Shapes) -> None:
    self._tensor_split_idx = shapes[0][-1]


def _set_inputs(self: Any, input_tensors: list[Any]) -> None:
    at = getattr(self, "_tensor_split_idx", None)  # never set without a pipeline, where there are no inputs
    for model, part in ((self.teacher_model, slice(at, None)), (self, slice(at))):
        type(self).set_input_tensor(model, [None if x is None else x[..., part] for x in input_tensors])


def _both_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The student's output; on a stage that is not the last, the teacher's behind it."""
    import torch
    from megatron.core import parallel_state

    theirs = None
    if self.training:
        with torch.no_grad():
            theirs = self.teacher_model.eval()(*args, **kwargs)
    with self.only_student_forward():
        own = type(self).forward(self, *args, **kwargs)
    return own if theirs is None or parallel_state.is_pipeline_last_stage() else torch.cat([own, theirs], -1)
