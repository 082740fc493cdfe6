"""Batches of tokens for `create_forward_loop`, and what is wrong with its arguments."""

from __future__ import annotations

import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

from bridge.core.errors import CalibrationError, UsageError


def is_device(value: Any) -> bool:
    """Whether a value is a device of torch, or the name of one."""
    return isinstance(value, str) or type(value).__name__ == "device"


def check_text(dataset_name: Any, tokenizer: Any) -> None:
    if not isinstance(dataset_name, str | Path | None):
        raise UsageError(f"dataset_name={dataset_name!r}; expected one name, a file or None")
    if tokenizer is None:
        raise UsageError("create_forward_loop needs a tokenizer, or a dataloader instead of text")
    if not hasattr(tokenizer, "pad_token"):
        raise UsageError(f"tokenizer={tokenizer!r}; give one in memory: AutoTokenizer.from_pretrained(...)")
    if tokenizer.pad_token is None:
        raise UsageError("the tokenizer has no padding token; set one: tokenizer.pad_token = tokenizer.eos_token")


def check_sizes(model: Any, batch_size: Any, num_samples: int, max_sample_length: int) -> None:
    if is_device(batch_size):
        raise UsageError(f"batch_size={batch_size!r} is a device; give it as device=")
    sizes = {
        "batch_size": (batch_size, 0),
        "num_samples": (num_samples, 1),
        "max_sample_length": (max_sample_length, 1),
    }
    if wrong := [f"{name}={value!r}" for name, (value, low) in sizes.items() if type(value) is not int or value < low]:
        raise UsageError(f"{', '.join(wrong)}; expected positive whole numbers (batch_size=0 asks CUDA)")
    import torch

    if not batch_size and (model is None or not torch.cuda.is_available()):
        raise UsageError("batch_size=0 tries how many rows fit CUDA memory; give model=, on a machine with CUDA")


def positions_of(model: Any) -> int | None:
    """The number of positions of a `transformers` model; None if its config does not say."""
    from bridge.sources.configs.positions import positions

    config: Any = getattr(model, "config", None)
    return positions(config.to_dict()) if hasattr(config, "to_dict") else None


def dataset(
    tools: Any, name: Any, tokenizer: Any, size: int, count: int, longest: int, device: Any, labels: bool
) -> Any:
    """Batches of a dataset that ModelOpt knows, else of a text."""
    if name not in tools.get_supported_datasets():
        return _batches(_texts(name, tokenizer, count), tokenizer, size, longest, device, labels)
    try:  # already tokenized in any case
        return list(tools.get_dataset_dataloader(name, tokenizer, size, count, longest, device, labels))
    except Exception as cause:  # hub, cache and parsing errors have no common base
        lines = str(cause).strip().splitlines() or [type(cause).__name__]
        raise CalibrationError(
            f"dataset {name} cannot be loaded here: {lines[0][:300]}; without network give dataset_name= a text or "
            "JSONL file, or None for the text that comes with bridge"
        ) from cause


def _texts(dataset_name: str | Path | None, tokenizer: Any, count: int) -> list[str]:
    """At most `count` texts: the documents, or pieces of the only document."""
    from bridge.calibration.data.documents import documents

    texts = documents(dataset_name, lambda: tokenizer, count)
    if len(texts) == 1:
        cuts = [at * len(texts[0]) // count for at in range(count + 1)]
        texts = [texts[0][begin:end] for begin, end in pairwise(cuts)]
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise CalibrationError(f"{dataset_name}: the calibration text is empty")
    return texts[:count]


def _batches(
    texts: list[str], tokenizer: Any, batch_size: int, longest: int, device: Any, labels: bool
) -> list[dict[str, Any]]:
    tokenizer = copy.deepcopy(tokenizer)  # encoding changes a tokenizer's padding and truncation settings
    encoded = tokenizer(texts, return_tensors="pt", padding=True, truncation=True, max_length=longest)
    rows = {name: encoded[name] for name in ("input_ids", "attention_mask")}
    if labels:
        rows["labels"] = rows["input_ids"].masked_fill(rows["attention_mask"] == 0, -100)
    parts = {name: tensor.to(device).split(batch_size) for name, tensor in rows.items()}
    return [dict(zip(parts, batch, strict=True)) for batch in zip(*parts.values(), strict=True)]
