"""NeMo's functions for distillation on megatron-core: the losses of NeMo's own and of ModelOpt's, at 1 and 2 stages."""

from __future__ import annotations

import json
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tests.needs import needs

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")
needs("modelopt")

from bridge.compat.nemo_distill import (  # noqa: E402
    DistillationConfig,
    adjust_distillation_model_for_mcore,
    load_distillation_config,
    teacher_provider,
)
from bridge.core.errors import UsageError  # noqa: E402
from tests import once  # noqa: E402
from tests.oracles import distill_process, megatron_oracle, nemo_modules  # noqa: E402

PAIR = "intermediate_layer_pairs: [[decoder.final_layernorm, decoder.final_layernorm]]\n"
CELLS = [(True, False), (True, True), (False, False)]  # skip the student's own loss, compare a pair of layers
nemo = pytest.mark.skipif(
    not nemo_modules.HOME.is_dir(), reason="NeMo's modules are not installed here; install them with: make oracles"
)


def cases(pp: int) -> list[dict[str, Any]]:
    """What the processes of one pipeline do one after the other."""
    found = [{"whose": "bridge", "copies": False, "skip": skip, "pair": pair} for skip, pair in CELLS]
    if nemo_modules.HOME.is_dir():
        found += [told | {"whose": "nemo"} for told in found] + [found[-1] | {"whose": "nemo", "copies": True}]
    if pp == 1:
        found += [told | {"whose": "modelopt"} for told in found[:2]]
    return found


def losses(whose: str, skip: bool, pp: int, pair: bool, copies: bool = False) -> Any:
    """What the processes of one case wrote, by rank. `copies`: of NeMo's functions with Megatron's loss mended."""
    root = once.directory("distillation on megatron-core", make)
    number = cases(pp).index({"whose": whose, "copies": copies, "skip": skip, "pair": pair})
    return [json.loads((root / f"{pp}-{rank}.json").read_text())[number] for rank in range(pp)]


def make(root: Path) -> None:
    (root / "pair.yaml").write_text(PAIR)
    for pp in (1, 2):
        with ExitStack() as stack:
            pools = [stack.enter_context(ProcessPoolExecutor(1, megatron_oracle.processes())) for _ in range(pp)]
            running = [pool.submit(distill_process.main, rank, pp, root, cases(pp)) for rank, pool in enumerate(pools)]
            for process in running:
                process.result(timeout=300)


def close(one: Any, other: Any) -> bool:
    return torch.allclose(torch.tensor(one), torch.tensor(other), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("pair", [False, True])
def test_losses_are_those_of_modelopts_plugin(pair: bool) -> None:
    (own,), (theirs,) = losses("bridge", True, 1, pair), losses("modelopt", True, 1, pair)
    assert len(own["losses"]) == 8 and close(own["losses"], theirs["losses"])
    assert own["losses"][-2][0] < own["losses"][0][0]  # of the same batch
    assert bool(own["losses"][0][2]) == pair
    assert own["teacher"] == [] and own["shapes"] is None


@pytest.mark.slow
@pytest.mark.parametrize(("skip", "pair"), CELLS)
def test_two_stages_give_the_losses_of_one(skip: bool, pair: bool) -> None:
    (whole,), (first, last) = losses("bridge", skip, 1, pair), losses("bridge", skip, 2, pair)
    assert close(whole["losses"], last["losses"]) and first["losses"] == []
    assert first["shapes"] == last["shapes"] == [[[16, 2, 224]], [[16, 2, 224]]]  # 96 and the teacher's 128


@nemo
@pytest.mark.slow
@pytest.mark.parametrize(("skip", "pair"), CELLS)
@pytest.mark.parametrize("pp", [1, 2])
def test_losses_are_those_of_nemos_own_functions(skip: bool, pp: int, pair: bool) -> None:
    """Its own teacher_provider too; with the student's loss where that does not overwrite logits, as it is mended."""
    own, theirs = losses("bridge", skip, pp, pair), losses("nemo", skip, pp, pair, copies=not skip)
    assert len(own[-1]["losses"]) == 8 and close(own[-1]["losses"], theirs[-1]["losses"])
    for one, other in zip(own, theirs, strict=True):
        assert (one["shapes"], one["teacher"]) == (other["shapes"], other["teacher"])


@pytest.mark.slow
@pytest.mark.parametrize("pp", [1, 2])
def test_the_students_own_loss_does_not_overwrite_its_logits(pp: int) -> None:
    """Megatron's cross entropy works in place."""
    without, beside = losses("bridge", True, pp, False)[-1], losses("bridge", False, pp, False)[-1]
    assert close(without["losses"][0][0], beside["losses"][0][0])
    total, logits = beside["losses"][0][1], beside["losses"][0][0]
    assert total > 2 * logits  # the student's own loss, and distillation weighed like it


@nemo
@pytest.mark.slow
def test_nemos_own_functions_compute_the_kl_on_what_the_students_loss_left() -> None:
    (without,), (beside,) = losses("nemo", True, 1, False), losses("nemo", False, 1, False)
    assert not close(without["losses"][0][0], beside["losses"][0][0])


def test_a_config_is_checked(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="pairs of two names"):
        DistillationConfig(intermediate_layer_pairs=[("decoder.layers.0",)])  # type: ignore[list-item]
    with pytest.raises(AssertionError, match="above 0"):
        DistillationConfig(kd_loss_scale=0)
    for content, kind, said in (
        (b"- 3", TypeError, "holds list"),
        (b"kd_loss_scal: 2", TypeError, "kd_loss_scal"),
        (b"kd_loss_scale: [2]", TypeError, "'>' not supported"),
        (b"{", yaml.YAMLError, "no distillation config"),
        (b"kd_loss_scale: \xff", ValueError, "no distillation config"),
        (None, FileNotFoundError, "no distillation config can be read"),
    ):
        (tmp_path / "kd.yaml").write_bytes(content) if content else (tmp_path / "kd.yaml").unlink()
        with pytest.raises(kind, match=said) as caught:
            load_distillation_config(tmp_path / "kd.yaml", None, None)
        assert isinstance(caught.value, UsageError) and str(caught.value).startswith(str(tmp_path / "kd.yaml"))


class Teacher(torch.nn.Linear):
    """A model with what NeMo's loading asks of it."""

    def sharded_state_dict(self, prefix: str, metadata: Any) -> dict[str, Any]:
        assert metadata == {"kind": "stored"}
        return {prefix + name: param for name, param in self.state_dict().items()}


@pytest.mark.parametrize("strict", [None, True, "log_all", "raise_all", "assume_ok_unexpected"])
def test_a_teacher_is_loaded_by_the_trainers_io(strict: Any) -> None:
    stored = {f"module.{name}": torch.full_like(param, 3) for name, param in Teacher(2, 3).state_dict().items()}
    seen: list[Any] = []

    def load(path: str, wanted: Any, strict: Any) -> Any:
        seen.append((path, sorted(wanted["state_dict"]), strict))
        return {"state_dict": stored}

    strategy = SimpleNamespace(
        unwrapped_checkpoint_io=SimpleNamespace(load_content_metadata=lambda path: {"kind": "stored"}),
        checkpoint_io=SimpleNamespace(load_checkpoint=load), ckpt_load_strictness=strict,
    )  # fmt: skip
    config = SimpleNamespace(configure_model=lambda tokenizer: Teacher(2, 3))
    model = teacher_provider(config, "there", tokenizer=None, trainer=SimpleNamespace(strategy=strategy))
    assert seen == [("there", ["module.bias", "module.weight"], strict)]
    assert bool((model.weight == 3).all())


def test_a_model_that_distills_nothing_is_refused() -> None:
    with pytest.raises(AssertionError, match="must have modelopt state"):
        adjust_distillation_model_for_mcore(torch.nn.Linear(2, 2), DistillationConfig())


class Stage(torch.nn.Sequential):
    """A module with the methods of a GPTModel that are bound anew."""

    def compute_language_model_loss(self, labels: Any, logits: Any) -> Any:
        return labels

    def sharded_state_dict(self) -> dict[str, Any]:
        return {}

    def set_input_tensor(self, tensors: Any) -> None:
        pass


def test_a_quantized_student_keeps_the_state_of_its_quantizers() -> None:
    import modelopt.torch.distill as mtd
    import modelopt.torch.opt as mto
    import modelopt.torch.quantization as mtq

    student, teacher = (Stage(torch.nn.Linear(4, 4)) for _ in range(2))
    student = mtq.quantize(student, mtq.INT8_DEFAULT_CFG, lambda model: model(torch.randn(2, 4)))
    losses = {"teacher_model": teacher, "criterion": mtd.LogitsDistillationLoss()}
    model = mtd.convert(student, mode=[("kd_loss", losses)])
    adjust_distillation_model_for_mcore(model, DistillationConfig())
    modes = [name for name, _ in mto.ModeloptStateManager(model).state_dict()]
    assert modes == ["quantize", "max_calibrate"]
