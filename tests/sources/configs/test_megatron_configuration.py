"""Where a Megatron checkpoint's configuration comes from, and what is asked for where nothing says it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import torch

from bridge.sources.opening import open_source
from tests.sources.foreign_checkpoints import CONFIG, llama, megatron_bridge, spelled
from tests.sources.test_megatron import assert_same, refusal
from tests.sources.weights.dcp_saves import save
from tests.tables import foreign as formulas
from tests.tables.checkpoints import headers


def nemo_2(root: Path, hf: dict[str, torch.Tensor]) -> Path:
    """A NeMo 2 directory with a serialized program in place of a readable configuration."""
    run = megatron_bridge(root / "run", spelled(hf, "megatron"))
    shutil.copytree(run / "iter_0000100", root / "nemo/weights", ignore=shutil.ignore_patterns("*.yaml"))
    (root / "nemo/context").mkdir()
    (root / "nemo/context/io.json").write_text('{"objects": {"a": {"type": {"module": "os", "name": "mkdir"}}}}')
    return root / "nemo"


def test_a_serialized_program_is_no_configuration(tmp_path: Path) -> None:
    hf = llama()
    nemo = nemo_2(tmp_path, hf)
    assert "the architecture is unknown" in refusal(nemo)
    message = refusal(nemo, config={"architectures": ["LlamaForCausalLM"]})
    assert "neither configuration nor tensors tell these; give config={" in message
    for field in ("num_attention_heads", "vocab_size", "rms_norm_eps", "rope_parameters", "max_position_embeddings"):
        assert f"\n    {field}: " in message
    source = open_source(nemo, config=CONFIG)
    assert_same(source, hf)
    assert source.dropped["context/io.json"] == "of the training run, not of the model"


def test_a_config_json_beside_megatrons_files_is_the_config(tmp_path: Path) -> None:
    """It wins over what the run says, the caller's over both, and the tensors check them all."""
    hf = llama()
    nemo = nemo_2(tmp_path, hf)
    (nemo / "config.json").write_text(json.dumps(CONFIG))
    source = open_source(nemo)
    assert_same(source, hf)
    assert source.dropped["config.json"] == "its place is taken by the config.json that is made of it"
    assert open_source(nemo, config={"rms_norm_eps": 3e-6}).config["rms_norm_eps"] == 3e-6
    run = megatron_bridge(tmp_path / "other", spelled(hf, "megatron"), layernorm_epsilon=1e-3) / "iter_0000100"
    (run / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 4, "intermediate_size": 81}))
    message = refusal(run)
    assert "the model's configuration, 2 problems" in message
    assert "config.json: num_hidden_layers = 4, but the tensors have 3" in message
    assert "config.json: intermediate_size = 81, but the tensors have 80" in message
    assert "config=: num_hidden_layers = 5, but the tensors have 3" in refusal(run, config={"num_hidden_layers": 5})
    (run / "config.json").write_text(json.dumps(CONFIG))
    assert open_source(run).config["rms_norm_eps"] == 1e-5


def test_norms_of_a_bare_checkpoint_are_asked_about(tmp_path: Path) -> None:
    """Norms that are stored less one differ from others in no name and no shape; transformers keeps Nemotron's so."""
    config = CONFIG | {"architectures": ["NemotronForCausalLM"], "model_type": "nemotron", "hidden_act": "relu2"}
    config |= {"norm_eps": 1e-5}
    numbers = np.random.default_rng(0)
    hf = {name: numbers.random(spec.shape, np.float32) for name, spec in headers(config).items()}
    state = formulas.megatron("nemotron", hf)  # moves norms as they are
    step = save(tmp_path / "bare", {name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in state.items()})
    assert 'give config={"layernorm_zero_centered_gamma": ...}' in refusal(step, config=config)
    assert "= 'true': must be true or false" in refusal(step, config=config | {"layernorm_zero_centered_gamma": "true"})
    for less_one in (True, False):
        source = open_source(step, config=config | {"layernorm_zero_centered_gamma": less_one})
        for name, array in hf.items():
            norm = "norm" in name and name.endswith(".weight")
            assert np.array_equal(source.read(name), array if less_one or not norm else array - 1), name
