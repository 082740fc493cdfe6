"""Scales of weights that are wrong in themselves, in the files of each writer."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bridge.cli.check import check_path
from tests.models import served_checkpoints, stored_checkpoints
from tests.models.faulty_checkpoints import experts, made, one_scale, retensored
from tests.oracles import compressed_oracle as compressed
from tests.oracles import export_oracle as oracle

UP = "model.layers.0.mlp.up_proj"


def gptq(root: Path) -> None:
    with oracle._quiet():
        stored_checkpoints.llama(torch.float32).save_pretrained(root / "source")
    served_checkpoints.write(root / "source", "gptq", root / "gptq")
    shutil.copytree(root / "gptq", root, dirs_exist_ok=True)


def deepseek(root: Path) -> None:
    stored_checkpoints.deepseek(root, {UP: (256, 256)}, plain={"model.norm.weight": (256,)})


def packed(root: Path) -> None:
    compressed.compress(stored_checkpoints.llama(), "W4A16", root)


WRITERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "gptq": (gptq, f"{UP}.scales"),
    "deepseek": (deepseek, f"{UP}.weight_scale_inv"),
    "packed": (packed, f"{UP}.weight_scale"),
    "one-scale": (one_scale, f"{UP}.weight_scale"),
    "above-blocks": (one_scale, f"{UP}.weight_global_scale"),
    "experts": (experts, "model.layers.1.mlp.experts.0.down_proj.weight_scale"),
}


def fresh(writer: str, tmp_path: Path) -> Path:
    return made("one-scale" if writer == "above-blocks" else f"of-{writer}", WRITERS[writer][0], tmp_path)


def found(directory: Path) -> list[str]:
    """What is said of the scales of weights, and where."""
    findings = [p.finding for p in check_path(directory) if p.finding and p.finding["rule"] == "scales-invalid"]
    return [f"{name}: {finding['what']}" for finding in findings for name in finding["where"]]


def filled(directory: Path, name: str, value: float) -> None:
    retensored(directory, lambda held: held.update({name: torch.full(held[name].shape, value).to(held[name].dtype)}))


@pytest.mark.parametrize("writer", WRITERS)
def test_scales_that_lose_or_spoil_a_weight_are_errors(writer: str, tmp_path: Path) -> None:
    broken, name = fresh(writer, tmp_path), WRITERS[writer][1]
    assert found(broken) == []
    filled(broken, name, 0)
    assert found(broken) == [f"{name}: is zero, and codes under it are not: those weights are lost"]
    filled(broken, name, torch.nan)
    assert found(broken) == [f"{name}: holds NaN or infinity"]


@pytest.mark.parametrize("writer", WRITERS)
def test_negative_scales_are_errors_but_for_integers_in_words(writer: str, tmp_path: Path) -> None:
    broken, name = fresh(writer, tmp_path), WRITERS[writer][1]
    filled(broken, name, -1)
    assert found(broken) == ([] if writer in ("gptq", "packed") else [f"{name}: is negative"])


def test_scales_far_above_any_weight_are_errors(tmp_path: Path) -> None:
    broken = fresh("deepseek", tmp_path)
    retensored(broken, lambda held: held[f"{UP}.weight_scale_inv"].mul_(1e6))
    assert found(broken) == [f"{UP}.weight_scale_inv: gives weights above 65504"]


def test_a_zero_scale_over_zero_codes_is_right(tmp_path: Path) -> None:
    """As a writer stores a block of zeros."""
    broken = fresh("deepseek", tmp_path)

    def change(held: dict[str, torch.Tensor]) -> None:
        held[f"{UP}.weight_scale_inv"][1, 0] = 0
        held[f"{UP}.weight"].view(torch.uint8)[128:, :128] = 0

    retensored(broken, change)
    assert found(broken) == []
    retensored(broken, lambda held: held[f"{UP}.weight"].view(torch.uint8)[255:, :1].fill_(1))
    assert len(found(broken)) == 1


def test_single_blocks_of_nvfp4_may_be_below_the_least_scale(tmp_path: Path) -> None:
    broken = fresh("one-scale", tmp_path)
    retensored(broken, lambda held: held[f"{UP}.weight_scale"].view(torch.uint8)[:1].fill_(0))
    assert found(broken) == []
