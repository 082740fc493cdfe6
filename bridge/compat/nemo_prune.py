"""NeMo's functions for pruning, under their names.

Scores are ModelOpt's (`importance="minitron"`, `order="importance"`), but heads of a group are scored by their own
channels: ModelOpt 0.35 views them in a wrong order. Intended differences from NeMo:

- A transformers model stays as it is, and the pruned one is returned. A live GPTModel of Megatron-Core, also in NeMo's
  wrapper, is pruned in place; its forward hooks have to be removed first.
- What NeMo ignores is an error: layers that are not there or twice, no target, sizes of Mamba for another model.
- One batch in nine, at least one, does not score what stays: perplexity is measured on it.
- A trainer is not needed. Its `limit_val_batches`, if there is one, bounds the batches of a data module.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from numbers import Integral
from pathlib import Path
from typing import Any

from bridge.compat.live_megatron import rebuild, why_not
from bridge.core.errors import PlanError, UsageError, warn
from bridge.sources.live_models.megatron import gpt_model
from bridge.sources.opening import open_source
from bridge.sources.source import Source
from bridge.tables.architectures.structure import match_table
from bridge.workflows.prune.verbs import prune as write
from bridge.workflows.prune.verbs import pruned

__all__ = ["PruningConfig", "prune", "prune_language_model"]

DIMS = {
    "target_ffn_hidden_size": "ffn",
    "target_hidden_size": "hidden",
    "target_num_attention_heads": "heads",
    "target_num_query_groups": "kv_heads",
    "target_num_layers": "layers",
}
MAMBA = ("target_mamba_num_heads", "target_mamba_head_dim")


class PruningValueError(UsageError, ValueError):
    """A wrong pruning config, where NeMo raises ValueError."""


class PruningTypeError(UsageError, TypeError):
    """A value of a pruning config that is no number of channels or no list of layers."""


class PruningAssertionError(UsageError, AssertionError):
    """A wrong pruning config, where ModelOpt or NeMo assert."""


class PruningSizeError(PlanError, AssertionError):
    """Sizes or layers that the model cannot have, which ModelOpt asserts or ignores."""


@dataclass
class PruningConfig:
    """Sizes after pruning, None for those that stay; or `drop_layers`, numbers from 1."""

    target_ffn_hidden_size: int | None = None
    target_hidden_size: int | None = None
    target_num_attention_heads: int | None = None
    target_num_query_groups: int | None = None
    target_mamba_num_heads: int | None = None
    target_mamba_head_dim: int | None = None
    target_num_layers: int | None = None
    drop_layers: Sequence[int] | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name == "drop_layers":
                fits = isinstance(value, Sequence) and not isinstance(value, str | bytes) and all(map(_is_whole, value))
            else:
                fits = _is_whole(value)
            if value is not None and not fits:
                what = "the numbers of layers, as [1, 2]" if name == "drop_layers" else "a whole number"
                raise PruningTypeError(f"{name} is {value!r}; expected {what}")
        sizes = [field.name for field in fields(self) if field.name != "drop_layers" and getattr(self, field.name)]
        if self.drop_layers and sizes:
            raise PruningValueError(f"drop_layers cannot be used with other pruning parameters ({', '.join(sizes)})")

    @property
    def keep(self) -> dict[str, int | str]:
        """Dim -> size, as `bridge.pruned` takes them."""
        return {dim: size for name, dim in DIMS.items() if (size := getattr(self, name)) is not None}

    @property
    def dropped(self) -> list[int] | None:
        """Numbers of layers to drop, from 0; None without any."""
        if not self.drop_layers:
            return None
        if wrong := [number for number in self.drop_layers if number < 1]:
            raise PruningAssertionError(f"drop_layers counts from 1, and has {wrong}")
        return [number - 1 for number in self.drop_layers]

    def check(self) -> None:
        """Refuse what NeMo or ModelOpt refuse, and what they ignore."""
        self.__post_init__()  # fields may have been set since
        if mamba := [name for name in MAMBA if getattr(self, name) is not None]:
            raise PruningValueError(f"{', '.join(mamba)}: bridge prunes no state-space layers; leave it out")
        keep, dropped = self.keep, self.dropped
        if not keep and not dropped:
            raise PruningValueError("the config names no size and no layer, so nothing would be pruned; set a target_")
        if ("heads" in keep) != ("kv_heads" in keep):
            raise PruningAssertionError(
                "target_num_attention_heads and target_num_query_groups should be provided together; give both, also "
                "if one of them stays"
            )
        if "heads" in keep and int(keep["heads"]) % int(keep["kv_heads"]):
            raise PruningAssertionError(
                f"target_num_attention_heads {keep['heads']} must be divisible by target_num_query_groups "
                f"{keep['kv_heads']}"
            )


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def prune_language_model(
    model: Any, pruning_config: PruningConfig, data_module: Any = None, trainer: Any = None
) -> Any:
    """Prune a GPTModel of Megatron-Core in place, or return a pruned transformers model; that one stays as it is.

    Args:
        model: a live GPTModel of Megatron-Core that is whole (TP 1, PP 1), a wrapper that has it as `.module`, a
            transformers model, or what `bridge.convert` takes. A GPTModel is scored as the transformers model of its
            weights, which takes its memory again.
        data_module: a Lightning data module, whose training batches have `tokens` or `input_ids` (batch, sequence), or
            data as `bridge.calibrate` takes them; not needed to drop layers.
        trainer: None, or an object whose `limit_val_batches` is the number of batches to run.

    Raises:
        PlanError: a size that the model or its config cannot have; layers that are not there, or twice, or all; as an
            AssertionError too.
        ValueError, AssertionError: where NeMo and ModelOpt raise them, as UsageError too.
    """
    pruning_config.check()
    if pruning_config.keep and data_module is None:
        raise PruningAssertionError("data_module is required to score what stays; give texts, a file or batches")
    gpt = gpt_model(model)
    if gpt is not None and (problem := why_not(gpt)):
        raise PruningSizeError(f"{type(gpt).__name__} in memory cannot be pruned: {problem}")
    source = open_source(model)
    limit = getattr(trainer, "limit_val_batches", None)
    with _as_assertion():
        smaller = pruned(
            source, _sizes(source, pruning_config), drop_layers=_layers(source, pruning_config),
            data=_batches(data_module, limit if type(limit) is int else None) if pruning_config.keep else None,
            importance="minitron", order="importance", progress=False,
        )  # fmt: skip
    if gpt is not None:
        rebuild(gpt, smaller)
        return model
    if hasattr(model, "state_dict"):
        warn(f"{type(model).__name__} in memory stays as it is; the pruned model is returned")
    return smaller.load_model()


def prune(
    nemo_checkpoint: str,
    save_path: str,
    pruning_config: PruningConfig,
    devices: int = 1,
    num_nodes: int = 1,
    tp_size: int = 1,
    pp_size: int = 1,
    num_layers_in_first_pipeline_stage: int | None = None,
    num_layers_in_last_pipeline_stage: int | None = None,
    num_train_samples: int = 1024,
    data: Any = None,
    tokenizer_path: str | None = None,
    legacy_ckpt: bool = False,
) -> str:
    """Write a pruned checkpoint for Megatron-Core to `save_path`, and return that path: NeMo's `llm.prune`.

    Args:
        nemo_checkpoint: any model that `bridge.convert` takes, of NeMo or not.
        num_train_samples: rows of `data` to run, one block of the model in memory at a time.
        data: what the model runs on, as `bridge.calibrate` takes it; not needed to drop layers.
        devices, num_nodes, tp_size, pp_size and stages: of NeMo; one process prunes models of any size here.
        legacy_ckpt: of NeMo; old checkpoints are read without it.
    """
    pruning_config.check()
    if pruning_config.keep and data is None:
        raise PruningAssertionError("data is required to score what stays; give texts, a file or batches")
    limit = num_train_samples
    if (batch := getattr(data, "global_batch_size", None)) is not None:
        if batch != data.micro_batch_size:
            raise PruningAssertionError(
                f"global_batch_size={batch} and micro_batch_size={data.micro_batch_size} of data must be equal; set one"
            )
        limit = num_train_samples // batch
    if max(devices, num_nodes, tp_size, pp_size) > 1:
        warn("one process prunes here, block by block; devices, num_nodes, tp_size and pp_size are not used")
    source = open_source(nemo_checkpoint, tokenizer=tokenizer_path)
    with _as_assertion():
        write(
            source, _sizes(source, pruning_config), Path(save_path), target="megatron", data=_batches(data, limit),
            drop_layers=_layers(source, pruning_config), importance="minitron", order="importance",
            samples=num_train_samples if pruning_config.keep else None,
        )  # fmt: skip
    return save_path


@contextmanager
def _as_assertion() -> Iterator[None]:
    """Raise what a model cannot have as an AssertionError too: ModelOpt asserts that a size is one of its choices."""
    try:
        yield
    except PlanError as error:
        raise PruningSizeError(str(error)) from error


def _sizes(source: Source, config: PruningConfig) -> dict[str, int | str] | None:
    """Sizes by dim; without groups if every head of the architecture has its own."""
    keep = config.keep
    if "kv_heads" in keep and not isinstance(match_table(source.config, source.specs).names.get("kv_heads"), int):
        if keep["kv_heads"] != keep["heads"]:
            raise PruningAssertionError(
                f"target_num_query_groups is {keep['kv_heads']}, but every head of this model has its own group; give "
                f"{keep['heads']}"
            )
        del keep["kv_heads"]
    return keep or None


def _layers(source: Source, config: PruningConfig) -> list[int] | None:
    """Numbers of layers to drop, from 0; those that are not there are told as the caller counts, from 1."""
    count = int(str(match_table(source.config, source.specs).names["layers"]))
    if wrong := sorted(number for number in config.drop_layers or () if number > count):
        raise PruningSizeError(f"{source.where}: layers to drop should be in range 1 to {count}, got {wrong}")
    return config.dropped


def _batches(data: Any, limit: int | None) -> Any:
    """At most `limit` training batches of a Lightning data module; other data as they are."""
    if not hasattr(data, "train_dataloader"):
        return data
    batches = [_batch(batch) for batch in itertools.islice(data.train_dataloader(), limit)]
    if not batches:
        raise PruningAssertionError(f"{type(data).__name__}.train_dataloader() gives no batch to score what stays")
    return batches


def _batch(batch: Any) -> Any:
    """The ids of a batch of Megatron's data sets; its mask is that of causal attention, which a model makes itself."""
    return {"input_ids": batch["tokens"]} if isinstance(batch, Mapping) and "tokens" in batch else batch
