"""nvdlfw-inspect's functions, under their names, answered by the features of bridge.

    from bridge import dlfw as debug_api

    debug_api.initialize("config.yaml", feature_dirs=["transformer_engine/debug/features"])

One engine a process, as there. `feature_dir()` is the folder of these features for nvdlfw-inspect's own engine.
Intended differences:

- A config with mistakes, or a file that is not there, is an error of `initialize`, which lists all of them.
- The features of Transformer Engine's own folder are bridge's; other folders are loaded, and what they raise is told.
- Several features of a layer add up. A GEMM is quantized if no feature is against it.
- `end_debug` warns of sections that were about no layer.
- Texts of the log have numbers with all their digits.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bridge.workflows.inspect.te.dlfw.run import Logger, Run, TransformerEngine
from bridge.workflows.inspect.te.dlfw.upstream import feature_dir

__all__ = [
    "end_debug", "explain_features", "feature_dir", "get_tensor_reduction_group", "infer_and_assign_layer_names",
    "initialize", "initialize_training_step", "list_features", "log_message", "log_tensor_stats",
    "set_tensor_reduction_group", "step", "transformer_engine",
]  # fmt: skip

DEBUG_MANAGER: Run | None = None  # Transformer Engine's modules look at it, and at its _trainer_iteration_count


def initialize(
    config_file: str | Path | Mapping[str, Any] = "",
    feature_dirs: Sequence[str] | str | None = None,
    statistics_logger: Logger | None = None,
    log_dir: str | Path = ".",
    init_training_step: int = 0,
    **kwargs: Any,
) -> None:
    """Read a config, and answer calls from now on; once in a process, before modules of Transformer Engine are made.

    Args:
        config_file: a config.yaml, or its content; "" runs without features, as upstream.
        feature_dirs: folders of feature classes, which are imported.
        statistics_logger: has `log_scalar(name, value, iteration)`.
        log_dir: the directory of the logs, and of dumps/ of DumpTensors.
        init_training_step: the first step's number.
        kwargs: tb_writer, a TensorBoard writer; default_logging_enabled: write the log beside another logger.

    Raises:
        InspectError: mistakes of the config, all of them; a feature class that cannot be loaded.
        ValueError: it is initialized already.
    """
    global DEBUG_MANAGER
    if DEBUG_MANAGER is not None:
        raise ValueError("initialize: it is initialized already; call end_debug first")
    DEBUG_MANAGER = Run(config_file, feature_dirs, statistics_logger, Path(log_dir), init_training_step, **kwargs)


def step() -> None:
    """End a step: log its statistics."""
    if DEBUG_MANAGER is not None:
        DEBUG_MANAGER.step()


def end_debug() -> None:
    """Forget everything; statistics of an unfinished step are dropped."""
    global DEBUG_MANAGER
    if DEBUG_MANAGER is not None:
        run, DEBUG_MANAGER = DEBUG_MANAGER, None
        run.close()
        state = sys.modules.get("transformer_engine.debug.pytorch.debug_state")
        if state is not None:  # its count of layers, and that it is debugged
            state.TEDebugState._reset()


def initialize_training_step(train_step: int) -> None:
    """Set the number of the step."""
    if DEBUG_MANAGER is not None:
        DEBUG_MANAGER._trainer_iteration_count = train_step


def log_message(
    msg: str, layer_name: str | None = None, level: int = logging.INFO, extra_cachable_args: Any = None
) -> None:
    """Write a line to the log, once for a text and a layer."""
    _run().log_message(msg, layer_name, level, extra_cachable_args)


def set_tensor_reduction_group(group: Any, layer_name: str | None = None) -> None:
    """The processes over which statistics of a step are added up, but for those of weights; without it, all.

    All of them call `step()` at each step. A call of `inspect_tensor` may have `reduction_group`, or
    `skip_reduction=True` for statistics of this process alone. Weights are added up over `tp_group` where a call has
    it with a `tp_size` above 1. `layer_name` has no effect, as upstream.
    """
    _run().engine.group = group


def get_tensor_reduction_group() -> Any:
    """What `set_tensor_reduction_group` was given."""
    return _run().engine.group


def list_features() -> None:
    """Print the names of the features."""
    print(_run().features)


def explain_features(features: str | Sequence[str] | None = None) -> None:
    """Print what features take; "all" takes each of them."""
    print("\n".join(_run().explained(features)))


def infer_and_assign_layer_names(model: Any) -> None:
    """Set `name` of each module of a model, or of a list of them, to its path below "model".

    Children of a ModuleList are numbered by their `layer_number`, if they have one.
    """
    for one in model if isinstance(model, list) else [model]:
        _assign(one, "model")


def log_tensor_stats(layer_name: str, **words: Any) -> dict[str, float]:
    """Log statistics of a tensor by LogTensorStats of a section itself; returns them by name.

    Words: tensor, tensor_name, and iteration for another step than the present one. All processes of the reduction
    group make the call, and get what it tells of all their tensors; `reduction_group` is another group,
    `skip_reduction=True` none.
    """
    return _run().log_tensor_stats(layer_name, **words)


def __getattr__(name: str) -> TransformerEngine:
    if name == "transformer_engine":
        return _run().transformer_engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _run() -> Run:
    if DEBUG_MANAGER is None:
        raise RuntimeError("nothing is initialized: call initialize first")
    return DEBUG_MANAGER


def _assign(module: Any, name: str) -> None:
    module.name = name
    numbered = type(module).__name__ == "ModuleList"
    for key, child in module.named_children():
        _assign(child, f"{name}.{getattr(child, 'layer_number', key) if numbered else key}")
