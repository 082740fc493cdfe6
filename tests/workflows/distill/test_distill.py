"""`bridge.distill`: what is refused, that it goes on where it was killed, and that it learns."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import bridge  # noqa: E402
from bridge.core.errors import BridgeError, TrainingError, UsageError  # noqa: E402
from bridge.reporting.report import report_from_dict  # noqa: E402
from bridge.sources.opening import open_source  # noqa: E402
from bridge.workflows.distill import batches, train  # noqa: E402
from bridge.workflows.distill.batches import rows_of  # noqa: E402
from bridge.workflows.distill.settings import Settings  # noqa: E402
from tests import forks  # noqa: E402
from tests.calibration.walk.test_workers import free_port  # noqa: E402
from tests.models.decoder_families import build  # noqa: E402

LLAMA = "examples/models/tiny-llama"
SMALL: dict[str, Any] = {"steps": 6, "batch": 2, "sequence": 48, "lr": 1e-3, "save_every": 2, "eval_every": 3}
FEW = SMALL | {"steps": 2, "eval_every": 2}  # for what does not depend on how much is learned


@pytest.fixture(scope="module")
def smaller() -> Any:
    return bridge.pruned(LLAMA, {"ffn": 192}, importance="weights")


def weights(directory: Path) -> bytes:
    return (directory / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_student_learns_from_its_teacher(smaller: Any, tmp_path: Path) -> None:
    report = bridge.distill(smaller, LLAMA, out=tmp_path / "out", **SMALL | {"steps": 12})
    told = report.distillation
    assert report.passed and told and report.pruning and report.pruning.dims == (("ffn", 384, 192),)
    assert told.steps == 12 and told.tokens == 12 * 2 * 48 and len(told.losses) == 12
    assert [step for step, _, _ in told.held_out] == [0, 3, 6, 9, 12]
    (_, before, worse), (_, after, better) = told.held_out[0], told.held_out[-1]
    assert after < 0.8 * before and told.teacher_perplexity < better < worse
    assert report_from_dict(json.loads(report.to_json())).distillation == told
    page = (tmp_path / "out/report.html").read_text()
    assert "Loss by step" in page and "step 12: KL on text held out" in page
    assert json.loads((tmp_path / "out/report.json").read_text())["distillation"]["steps"] == 12
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]  # no state is left


@pytest.mark.slow
@pytest.mark.parametrize(
    "quant", [*(pytest.param(quant, marks=pytest.mark.product) for quant in (None, "int8_wo")), "fp8"]
)
def test_a_killed_run_goes_on_to_the_same_bytes(quant: str | None, smaller: Any, tmp_path: Path) -> None:
    def distill(out: str, progress: Any) -> Any:
        return bridge.distill(
            smaller, LLAMA, out=tmp_path / out, quant=quant, **SMALL | {"lr": 1e-4}, progress=progress
        )

    stops: list[int] = []

    def stop(done: int, total: int, stage: str) -> None:
        if stage == "train" and done == 5 and not stops:
            stops.append(done)
            raise KeyboardInterrupt

    whole = distill("whole", False)
    with pytest.raises(KeyboardInterrupt):
        distill("killed", stop)
    states = sorted(path.name for path in (tmp_path / ".killed.distill").glob("state-*"))
    assert states == ["state-00000002.safetensors", "state-00000004.safetensors"]
    steps: list[int] = []
    again = distill("killed", lambda done, total, stage: steps.append(done) if stage == "train" else None)
    assert steps == [5, 6]
    assert weights(tmp_path / "whole") == weights(tmp_path / "killed")
    assert whole.distillation and again.distillation
    assert whole.distillation.losses == again.distillation.losses
    assert whole.distillation.held_out == again.distillation.held_out


@pytest.mark.slow
def test_what_comes_before_the_first_step_is_told_and_an_early_state_is_kept(smaller: Any, tmp_path: Path) -> None:
    """75 seconds passed under "train", and a run that was killed before step 100 began again."""
    stages: list[str] = []

    def stop(done: int, total: int, stage: str) -> None:
        stages.append(stage)
        if stage == "train" and done == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bridge.distill(smaller, LLAMA, out=tmp_path / "out", **SMALL | {"save_every": 100, "steps": 8}, progress=stop)
    before = [*dict.fromkeys(stages)]
    assert before[-4:] == [
        "load the teacher, and measure it on held-out text", "load the student", "held-out text", "train",
    ]  # fmt: skip
    assert [path.name for path in (tmp_path / ".out.distill").glob("state-*")] == ["state-00000005.safetensors"]


@pytest.mark.slow
def test_another_run_does_not_take_up_what_is_left(smaller: Any, tmp_path: Path) -> None:
    def stop(done: int, total: int, stage: str) -> None:
        if stage == "train" and done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bridge.distill(smaller, LLAMA, out=tmp_path / "out", **SMALL, progress=stop)
    other = SMALL | {"lr": 5e-4}
    with pytest.raises(BridgeError, match="left from an unfinished run"):
        bridge.distill(smaller, LLAMA, out=tmp_path / "out", **other)
    assert bridge.distill(smaller, LLAMA, out=tmp_path / "out", **other, resume=False).passed


@pytest.mark.slow
def test_a_stored_teacher_is_not_loaded(smaller: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    how = FEW | {"top_k": 64, "teacher_cache": tmp_path / "cache"}
    first = bridge.distill(smaller, LLAMA, out=tmp_path / "first", **how)
    assert first.distillation and first.distillation.cache_bytes > 0
    teacher = open_source(LLAMA)
    monkeypatch.setattr(type(teacher), "load_model", unused)
    again = bridge.distill(smaller, teacher, out=tmp_path / "again", **how)
    assert again.distillation and again.distillation.held_out == first.distillation.held_out
    assert weights(tmp_path / "first") == weights(tmp_path / "again")


@pytest.mark.slow
def test_a_damaged_shard_is_named(smaller: Any, tmp_path: Path) -> None:
    how = FEW | {"top_k": 8, "teacher_cache": tmp_path / "cache"}
    bridge.distill(smaller, LLAMA, out=tmp_path / "out", **how)
    shard = sorted((tmp_path / "cache").glob("rows-*"))[0]
    whole = shard.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:-5] + b"x" + whole[-4:], whole[:40] + b"!" + whole[41:]):
        shard.write_bytes(damaged)
        with pytest.raises(UsageError, match=r"rows-.*safetensors: is damaged; remove this file"):
            bridge.distill(smaller, LLAMA, out=tmp_path / "again", **how)
    shard.unlink()
    assert bridge.distill(smaller, LLAMA, out=tmp_path / "again", **how).passed
    assert weights(tmp_path / "out") == weights(tmp_path / "again")


def test_weights_that_are_not_finite_are_told(tmp_path: Path) -> None:
    student = build("LlamaForCausalLM", torch.float32)
    with torch.no_grad():
        student.model.norm.weight[0] = float("nan")
    data = [{"input_ids": torch.randint(3, 90, (12, 24), generator=torch.Generator().manual_seed(1))}]
    with pytest.raises(TrainingError, match="its logits are NaN or infinite"):
        bridge.distill(student, student, data, tmp_path / "out", steps=1, batch=2, sequence=24)
    empty = [data[0] | {"attention_mask": torch.zeros(12, 24, dtype=torch.int64)}]
    with pytest.raises(UsageError, match="has no token that its attention_mask keeps"):
        bridge.distill(student, student, empty, tmp_path / "out", steps=1, batch=2, sequence=24)


@pytest.mark.slow
@pytest.mark.product  # over a minute
def test_outputs_are_compared_with_the_trained_model(smaller: Any, tmp_path: Path) -> None:
    how = SMALL | {"lr": 5e-4, "steps": 12}
    report = bridge.distill(smaller, LLAMA, out=tmp_path / "out", target="trt", quant="fp8", **how)
    assert report.passed and report.parity.outputs


def unused(self: Any) -> Any:
    raise AssertionError(f"{self.where} is loaded")


@pytest.mark.slow
def test_stored_answers_are_those_of_a_teacher_that_runs(smaller: Any, tmp_path: Path) -> None:
    how = FEW | {"top_k": 64, "pairs": None}
    live = bridge.distill(smaller, LLAMA, out=tmp_path / "live", **how).distillation
    cached = bridge.distill(
        smaller, LLAMA, out=tmp_path / "cached", **how, teacher_cache=tmp_path / "cache"
    ).distillation
    assert live and cached
    for (_, own), (_, theirs) in zip(live.losses, cached.losses, strict=True):
        assert own == pytest.approx(theirs, abs=2e-3)  # log-probabilities are stored in float16
    assert live.held_out[0][2] == cached.held_out[0][2]
    assert live.teacher_perplexity == cached.teacher_perplexity


@pytest.mark.slow
def test_a_model_in_memory_stays_as_it_is(tmp_path: Path) -> None:
    student, teacher = build("LlamaForCausalLM", torch.float32), build("LlamaForCausalLM", torch.float32)
    with torch.no_grad():
        for param in student.parameters():
            param.add_(0.01 * torch.randn(param.shape, generator=torch.Generator().manual_seed(0)))
    before = {name: param.clone() for name, param in student.state_dict().items()}
    ids = torch.randint(3, 90, (12, 24), generator=torch.Generator().manual_seed(1))
    bridge.distill(student, teacher, [{"input_ids": ids}], tmp_path / "out", steps=3, batch=4, sequence=24, lr=1e-4)
    assert all(torch.equal(param, before[name]) for name, param in student.state_dict().items())
    assert not any(param.grad is not None for param in student.parameters())
    assert not torch.equal(open_source(tmp_path / "out").load_model().lm_head.weight, student.lm_head.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_and_widths_may_differ(dtype: Any, tmp_path: Path) -> None:
    teacher = build("LlamaForCausalLM", dtype)
    student = build("LlamaForCausalLM", dtype, hidden_size=48, num_hidden_layers=1)
    ids = torch.randint(3, 90, (12, 24), generator=torch.Generator().manual_seed(1))
    report = bridge.distill(
        student,
        teacher,
        [{"input_ids": ids}],
        tmp_path / "out",
        steps=4,
        batch=4,
        sequence=24,
        lr=1e-3,
        pairs=[(0, 0), (0, 1)],
    )
    names = {name for name in open_source(tmp_path / "out").specs if "projection" in name}
    assert report.passed and not names


CASES: list[tuple[str, Callable[[Path], dict[str, Any]], str]] = [
    ("vocabulary", lambda _: {"teacher": "examples/models/tiny-gpt2"}, "has a vocabulary of 1,536, and the teacher"),
    ("cache without k", lambda path: {"teacher_cache": path / "cache"}, "say how many, top_k=64"),
    ("cache and layers", lambda path: {"teacher_cache": path / "c", "top_k": 4, "pairs": [(0, 0)]}, "leave them or"),
    ("no such layer", lambda _: {"pairs": [(0, 7)]}, "the teacher has layers 0 to 4, and no 7"),
    ("no pairs", lambda _: {"pairs": "layers"}, 'expected "norm", None, or pairs of layers'),
    ("steps", lambda _: {"steps": 0}, "steps=0 (--steps): expected a positive whole number"),
    ("rate", lambda _: {"lr": float("nan")}, "lr=nan (--lr): expected a positive number"),
    ("k", lambda _: {"top_k": 1536}, "the vocabulary has 1,536 ids"),
    ("sequence", lambda _: {"sequence": 1024}, "the model has 512 positions"),
    ("automatic", lambda _: {"quant": "auto:5bits"}, "make the recipe with `qbridge sensitivity`"),
    ("remote", lambda _: {"out": "s3://bucket/out"}, "give a local directory, then upload"),
    ("memory", lambda _: {"memory": "1MB"}, "allowed by memory= (--memory); a teacher_cache="),
    ("kv", lambda _: {"quant": "fp8", "kv": "fp8"}, "a KV cache is not trained through"),
    ("seed", lambda _: {"seed": 1 << 40}, "expected a whole number from 0 to"),
    ("calib", lambda _: {"quant": "fp8", "calib": "corpus.txt"}, "give a saved calibration"),
    ("loop", lambda _: {"data": lambda model: None}, "training needs rows of tokens"),
    ("not text", lambda _: {"student": bert()}, "only models that predict the next token"),
]


def bert() -> Any:
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 40}
    return BertModel(BertConfig(vocab_size=97, **sizes))


@pytest.mark.parametrize(("name", "given", "said"), CASES, ids=[name for name, _, _ in CASES])
def test_what_cannot_be_is_refused_before_a_model_is_loaded(
    name: str, given: Callable[[Path], dict[str, Any]], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(open_source(LLAMA)), "load_model", unused)
    arguments = {"student": LLAMA, "teacher": LLAMA, "out": tmp_path / "out", **SMALL, **given(tmp_path)}
    with pytest.raises(BridgeError) as raised:
        bridge.distill(**arguments)
    assert said in str(raised.value)
    assert not any(tmp_path.iterdir())


def test_a_quantized_student_is_refused(tmp_path: Path) -> None:
    bridge.convert(LLAMA, "hf", "int8_wo", tmp_path / "coded", verify=False)
    with pytest.raises(TrainingError, match='convert it with quant="none" first'):
        bridge.distill(tmp_path / "coded", LLAMA, out=tmp_path / "out", **SMALL)


@pytest.mark.slow
def test_a_cache_of_something_else_is_refused(smaller: Any, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    how = FEW | {"teacher_cache": cache}
    bridge.distill(smaller, LLAMA, out=tmp_path / "out", **how, top_k=8)
    for other, differs in (
        ({"top_k": 9}, "top_k"),
        ({"top_k": 8, "temperature": 2.0}, "temperature"),
        ({"top_k": 8, "sequence": 32}, "data"),
    ):
        with pytest.raises(UsageError, match=f"holds answers with another .*{differs}"):
            bridge.distill(smaller, LLAMA, out=tmp_path / "other", **how | other)
    teacher = bridge.pruned(LLAMA, {"ffn": 320}, importance="weights")
    with pytest.raises(UsageError, match="holds answers with another teacher"):
        bridge.distill(smaller, teacher, out=tmp_path / "other", **how, top_k=8)
    (tmp_path / "files").mkdir()
    (tmp_path / "files/note.txt").write_text("mine")
    with pytest.raises(UsageError, match="it is not a cache of a teacher"):
        bridge.distill(smaller, LLAMA, out=tmp_path / "other", **FEW, top_k=8, teacher_cache=tmp_path / "files")


@pytest.mark.slow
def test_a_loss_that_is_not_finite_names_its_step(
    smaller: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, calls = train.divergence, [0]

    def divergence(*given: Any) -> Any:
        calls[0] += 1
        return plain(*given) * (float("nan") if calls[0] > 60 and torch.is_grad_enabled() else 1.0)

    monkeypatch.setattr(train, "divergence", divergence)
    with pytest.raises(TrainingError, match=r"step \d+: the loss is nan; a smaller lr=") as raised:
        bridge.distill(smaller, LLAMA, out=tmp_path / "out", **SMALL | {"save_every": 1, "steps": 40})
    assert any("what was done before is kept in" in note for note in raised.value.__notes__)
    assert list((tmp_path / ".out.distill").glob("state-*"))
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_student_that_became_worse_is_not_written(tmp_path: Path) -> None:
    with (
        pytest.warns(UserWarning, match="rose from"),
        pytest.raises(TrainingError, match=r"a smaller lr= \(--lr, now 0.5\)"),
    ):
        bridge.distill(LLAMA, LLAMA, out=tmp_path / "out", **SMALL | {"lr": 0.5, "pairs": None}, quant="int8_wo")
    assert not (tmp_path / "out").exists()


def test_as_much_text_is_read_as_the_steps_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A calibration reads the first characters of a corpus only."""
    monkeypatch.setattr(batches, "CHARACTERS", 4000)
    monkeypatch.setattr(batches, "ROWS", 8)
    text = tmp_path / "corpus.txt"
    text.write_text("".join(f"The number {n} is followed by {n + 1}. " for n in range(20_000)))
    source = open_source(LLAMA)
    few, many = (rows_of(source, text, None, Settings(steps=steps, batch=8, sequence=64)) for steps in (1, 60))
    assert 4 <= few.trained <= 8
    assert many.trained == 480


# In two processes, one after the other: without a common disk, then with one.
PAIR = f"""
import os, sys
from pathlib import Path
import bridge
from bridge.core.errors import UsageError
root, rank, whole = Path(sys.argv[1]), os.environ["RANK"], os.path.abspath({LLAMA!r})
smaller = bridge.pruned(whole, {{'ffn': 192}}, importance='weights')
os.chdir(root / rank)
try:
    bridge.distill(whole, whole, out='out', steps=2, batch=2, sequence=32, progress=False, quant='int8_wo')
except UsageError as error:
    Path('refused').write_text(str(error))
bridge.distill(smaller, whole, out=root / 'two', steps=4, batch=3, sequence=48, lr=1e-3, progress=False)
"""


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("two")
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "OMP_NUM_THREADS": "1"}
    for rank in range(2):
        (root / str(rank)).mkdir()
    environments = [{**shared, "RANK": str(rank)} for rank in range(2)]
    ended = forks.together(PAIR, Path.cwd(), 300, [str(root)], environments)
    assert [code for code, _ in ended] == [0, 0], ended
    return root


@pytest.mark.slow
def test_processes_without_a_common_disk_are_refused(of_two: Path) -> None:
    """The first keeps the states; the others would begin again where it goes on."""
    said = [(of_two / str(rank) / "refused").read_text() for rank in range(2)]
    assert all("the processes see different files there; give a disk that all of them share" in text for text in said)


@pytest.mark.slow
def test_processes_share_each_batch(of_two: Path, tmp_path: Path) -> None:
    """Two processes and one: sums are made in another order, so that losses differ in the last digits."""
    one = bridge.distill(
        bridge.pruned(LLAMA, {"ffn": 192}, importance="weights"), LLAMA, out=tmp_path / "one", steps=4, batch=3,
        sequence=48, lr=1e-3, progress=False,
    )  # fmt: skip
    told = json.loads((of_two / "two/report.json").read_text())["distillation"]
    assert one.distillation
    for (_, own), (_, theirs) in zip(one.distillation.losses, told["losses"], strict=True):
        assert own == pytest.approx(theirs, rel=1e-4)
    for (_, kl, _), (_, theirs, _) in zip(one.distillation.held_out, told["held_out"], strict=True):
        assert kl == pytest.approx(theirs, rel=1e-3)
