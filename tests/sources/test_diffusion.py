"""Directories of diffusers, read without it: models, pipelines, and what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from bridge.core.errors import SourceError
from bridge.core.values import InputGroup
from bridge.planning.diffusion import attention_groups, why_kept
from bridge.sources.opening import open_source
from bridge.sources.source import Source
from bridge.targets.config_json import config_json

CONFIG = {"_class_name": "DiTTransformer2DModel", "_diffusers_version": "0.42.1", "num_layers": 2}
TENSORS = {f"blocks.{at}.weight": np.full((2, 3), at, np.float32) for at in range(3)}
STEM = "diffusion_pytorch_model"


def model_in(root: Path, name: str = f"{STEM}.safetensors", config: object = CONFIG) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    (root / "config.json").write_text(json.dumps(config))
    save_file(TENSORS, root / name)
    return root


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    root = tmp_path / "pipeline"
    model_in(root / "transformer")
    model_in(root / "vae", config={"_class_name": "AutoencoderKL"})
    save_file(TENSORS, root / "vae" / f"{STEM}.fp16.safetensors")
    (root / "vae" / f"{STEM}.bin").write_bytes(b"a pickle")
    (root / "text_encoder").mkdir()
    (root / "text_encoder" / "pytorch_model.bin").write_bytes(b"a pickle")
    (root / "scheduler").mkdir()
    (root / "scheduler" / "scheduler_config.json").write_text("{}")
    save_file(TENSORS, root / "all-in-one.safetensors")
    index = {
        "_class_name": "DiTPipeline", "_diffusers_version": "0.42.1", "id2label": {"0": "a cat"},
        "transformer": ["diffusers", "DiTTransformer2DModel"], "vae": ["diffusers", "AutoencoderKL"],
        "text_encoder": ["transformers", "CLIPTextModel"], "scheduler": ["diffusers", "DDIMScheduler"],
        "safety_checker": [None, None],
    }  # fmt: skip
    (root / "model_index.json").write_text(json.dumps(index))
    return root


def index_of(root: Path, **parts: Any) -> None:
    index = json.loads((root / "model_index.json").read_text())
    kept = {name: part for name, part in {**index, **parts}.items() if part is not None}
    (root / "model_index.json").write_text(json.dumps(kept))


def refusal(model: object, **arguments: object) -> str:
    with pytest.raises(SourceError) as caught:
        open_source(model, **arguments)
    return str(caught.value)


def same_tensors(source: Source) -> bool:
    return all(np.array_equal(source.read(name), tensor) for name, tensor in TENSORS.items())


def test_a_model_has_its_class_as_architecture_and_its_tensors(tmp_path: Path) -> None:
    source = open_source(model_in(tmp_path / "dit"))
    assert source.config["architectures"] == ["DiTTransformer2DModel"]
    assert list(source.specs) == list(TENSORS) and same_tensors(source)
    assert "config.json" in source.side_files and not source.dropped


def test_the_written_config_is_that_of_diffusers(tmp_path: Path) -> None:
    source = open_source(model_in(tmp_path / "dit"))
    assert json.loads(config_json(source.config, None, False)) == CONFIG


def test_shards_are_read_by_their_index(tmp_path: Path) -> None:
    root = tmp_path / "dit"
    files = [f"{STEM}-{at:05}-of-00003.safetensors" for at in (1, 2, 3)]
    model_in(root).joinpath(f"{STEM}.safetensors").unlink()
    for file, (name, tensor) in zip(files, TENSORS.items(), strict=True):
        save_file({name: tensor}, root / file)
    weight_map = dict(zip(TENSORS, files, strict=True))
    (root / f"{STEM}.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    source = open_source(root)
    assert same_tensors(source) and not source.dropped
    (root / files[1]).unlink()
    assert f"{files[1]}: missing, though the index names it" in refusal(root)


def test_a_variant_beside_the_weights_is_left_out(tmp_path: Path) -> None:
    root = model_in(tmp_path / "dit")
    save_file({"other": np.zeros(2, np.float16)}, root / f"{STEM}.fp16.safetensors")
    source = open_source(root)
    assert list(source.specs) == list(TENSORS)
    assert f"{STEM}.fp16.safetensors" in source.dropped


def test_a_variant_alone_is_named(tmp_path: Path) -> None:
    message = refusal(model_in(tmp_path / "dit", f"{STEM}.fp16.safetensors"))
    assert "only weights of the variant fp16" in message and f"rename them to {STEM}.safetensors" in message


def test_a_model_without_weights_is_named(tmp_path: Path) -> None:
    root = model_in(tmp_path / "dit", "other.safetensors")
    assert f"neither {STEM}*.safetensors nor {STEM}.bin" in refusal(root)


def test_a_pipeline_is_its_denoiser_with_all_other_parts_beside_it(pipeline: Path) -> None:
    source = open_source(pipeline)
    assert source.config["_class_name"] == "DiTTransformer2DModel" and same_tensors(source)
    assert set(source.side_files) == {
        "model_index.json", "scheduler/scheduler_config.json", "text_encoder/pytorch_model.bin", "vae/config.json",
        f"vae/{STEM}.safetensors",
    }  # fmt: skip
    assert source.dropped == {
        "all-in-one.safetensors": "weights that no part of the pipeline names",
        f"vae/{STEM}.bin": "a variant of weights that are copied, or of another format",
        f"vae/{STEM}.fp16.safetensors": "a variant of weights that are copied, or of another format",
    }


def test_of_two_denoisers_one_is_to_be_given(pipeline: Path) -> None:
    index_of(pipeline, transformer_2=["diffusers", "DiTTransformer2DModel"])
    message = refusal(pipeline)
    assert "a pipeline of diffusers (DiTPipeline) with 2 denoisers (transformer, transformer_2)" in message
    assert f"such as {pipeline / 'transformer'}" in message


def test_a_pipeline_of_other_parts_names_its_models(pipeline: Path) -> None:
    index_of(pipeline, transformer=None, prior=["diffusers", "PriorTransformer"])
    message = refusal(pipeline)
    assert "without a part called transformer, unet of diffusers" in message
    assert str(pipeline / "vae") in message


def test_a_class_that_diffusers_lacks_is_told_with_its_name(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    source = open_source(model_in(tmp_path / "model", config={"_class_name": "NoSuchTransformer"}))
    with pytest.raises(SourceError, match=r"NoSuchTransformer is (not )?a model of diffusers"):
        source.load_skeleton()


@pytest.mark.parametrize(
    ("architecture", "module", "kept"),
    [
        ("FluxTransformer2DModel", "proj_out", True),
        ("FluxTransformer2DModel", "single_transformer_blocks.0.proj_out", False),
        ("FluxTransformer2DModel", "transformer_blocks.0.norm1.linear", False),
        ("UNet2DConditionModel", "down_blocks.0.resnets.0.time_emb_proj", True),
        ("UNet2DConditionModel", "mid_block.attentions.0.proj_in", False),
        ("WanTransformer3DModel", "blocks.2.attn1.to_q", True),
        ("WanTransformer3DModel", "blocks.20.attn1.to_q", False),
        ("WanTransformer3DModel", "blocks.39.ffn.net.2", True),
        ("DiTTransformer2DModel", "proj_out_2", True),
    ],
)
def test_the_layers_that_modelopts_example_keeps_are_kept(architecture: str, module: str, kept: bool) -> None:
    assert bool(why_kept(architecture, module)) == kept


def test_scales_are_shared_within_one_attention_only() -> None:
    image, text = ["a.to_q", "a.to_k", "a.to_v"], ["a.add_q_proj", "a.add_k_proj"]
    group = InputGroup((*image, "a.proj_mlp", *text, "b.to_k"), "norm", alone=True)
    assert attention_groups([group]) == (InputGroup(tuple(image)), InputGroup(tuple(text)))
