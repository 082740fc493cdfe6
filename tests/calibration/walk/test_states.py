"""Activations in files give the bytes of activations in memory, leave memory, and leave nothing behind."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from tests.needs import needs

torch = pytest.importorskip("torch")
needs("modelopt")

import bridge  # noqa: E402
from bridge.calibration.calibrate import choose_strategy  # noqa: E402
from bridge.calibration.data import prepare  # noqa: E402
from bridge.calibration.job import CalibrationJob  # noqa: E402
from bridge.calibration.walk import resume, states  # noqa: E402
from bridge.calibration.walk.budget import Tokens, by_blocks, calibration_need, choice  # noqa: E402
from bridge.calibration.walk.options import Options  # noqa: E402
from bridge.calibration.walk.run import Walk, calibrate_by_blocks  # noqa: E402
from bridge.calibration.walk.states import Spill  # noqa: E402
from bridge.core.errors import BridgeWarning, UsageError, WriteError  # noqa: E402
from bridge.core.files.matrices import AppendedFile  # noqa: E402
from bridge.planning.structure import structure_of  # noqa: E402
from bridge.quant.schemes.load import load_scheme  # noqa: E402
from bridge.sources.opening import open_source  # noqa: E402
from tests.calibration.walk.walked_models import batches  # noqa: E402
from tests.covering import grid  # noqa: E402
from tests.models.decoder_families import build  # noqa: E402
from tests.models.sparse_checkpoint import LLAMA_405B, llama_specs  # noqa: E402

Usage = namedtuple("Usage", "total used free")
LLAMA_70B = LLAMA_405B | {
    "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80,
}  # fmt: skip
NEED = calibration_need(
    {spec.name: spec for spec in llama_specs(LLAMA_70B)}, LLAMA_70B, load_scheme("fp8"), Tokens(4096, 512 * 512, 4096)
)


@pytest.fixture(autouse=True)
def every_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "SMALL", 0)


@grid(
    {
        "family": ["LlamaForCausalLM", "T5ForConditionalGeneration", "Qwen3MoeForCausalLM", "Gemma3ForCausalLM"],
        "scheme": [("fp8", None), ("int4_awq", "fp8")],
        "share": [0, 60_000],
    },
    cost=lambda family, scheme, _: family.startswith("T5") and scheme[0] == "int4_awq",
)
def test_bytes_are_those_of_activations_in_memory(
    family: str, scheme: tuple[str, str | None], share: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(family, torch.float32).save_pretrained(tmp_path / "model")
    source = open_source(tmp_path / "model")
    structure = structure_of(source)
    bound = load_scheme(scheme[0], kv=scheme[1]).bound(structure.sites)
    data = prepare(batches("Conditional" in family), source)
    expected = calibrate_by_blocks(CalibrationJob(source, structure, bound, data)).to_bytes()
    left: list[int] = []
    visit = Walk._visit
    (tmp_path / "files").mkdir()
    spill = Spill(tmp_path / "files", share)

    def noted(self: Walk, block: Any) -> Any:
        held = [(b.forward.args, b.forward.kwargs, b.output) for b in self.streams.all if b.forward.block]
        left.append(sum(s.nbytes() for s, _ in states._storages(held) if s._cdata not in spill._mapped))
        return visit(self, block)

    monkeypatch.setattr(Walk, "_visit", noted)
    options = Options(spill=spill)
    found = calibrate_by_blocks(CalibrationJob(source, structure, bound, data), options)
    assert found.to_bytes() == expected
    assert max(left[1:]) <= share  # the first block gets the ids of the data
    assert not [*(tmp_path / "files").iterdir()]


def in_process(key: str) -> int:
    return int(Path("/proc/self/status").read_text().partition(f"{key}:")[2].split()[0]) << 10


def test_a_tensor_leaves_memory_and_keeps_its_values(tmp_path: Path) -> None:
    spill, before = Spill(tmp_path, 0), in_process("RssFile")
    tensor = torch.arange(8 << 20, dtype=torch.float32)
    plain, holder = tensor.clone(), {"x": [tensor]}
    spill.keep(holder)
    assert in_process("RssFile") < before + (4 << 20)  # nothing of it was read yet
    assert torch.equal(tensor, plain) and in_process("RssFile") > before + (24 << 20)
    tensor += 1
    spill.release(holder)
    assert in_process("RssFile") < before + (4 << 20)
    assert torch.equal(holder["x"][0], plain + 1)
    assert not [*tmp_path.iterdir()]


def test_views_move_with_what_they_are_views_of(tmp_path: Path) -> None:
    spill, base = Spill(tmp_path, 0), torch.arange(12.0)
    view = base.view(3, 4).T
    spill.keep((view,))
    assert view.stride() == (1, 4) and view.data_ptr() == base.data_ptr()
    assert view._cdata and spill._mapped
    base[5] = -1
    assert view[1, 1] == -1


def test_a_tensor_that_others_share_stays_where_it_is(tmp_path: Path) -> None:
    spill, base = Spill(tmp_path, 0), torch.arange(12.0)
    other, where = base.detach(), base.data_ptr()
    spill.keep((base,))
    assert base.data_ptr() == where == other.data_ptr()


def test_the_first_tensors_stay_in_their_share_of_memory(tmp_path: Path) -> None:
    spill, tensors = Spill(tmp_path, 100), [torch.zeros(10) for _ in range(4)]
    where = [tensor.data_ptr() for tensor in tensors]
    spill.keep(tensors)
    assert [tensor.data_ptr() == was for tensor, was in zip(tensors, where, strict=True)] == [True, True, False, False]
    del tensors[0]
    after = torch.zeros(10)
    was = after.data_ptr()
    spill.keep(after)
    assert after.data_ptr() == was


def test_a_full_disk_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    with pytest.raises(
        WriteError, match=r"the disk is full while activations were kept there; free some, give memory="
    ):
        Spill(tmp_path, 0).keep(torch.zeros(10))


def test_little_memory_puts_the_rest_of_the_activations_on_disk() -> None:
    assert NEED.states == 2 * 8192 * 2 * (512 * 512 + 2 * 4096) and NEED.least < NEED.blocks.held
    assert NEED.share(NEED.blocks.held) == NEED.states and NEED.share(NEED.least) == 0
    half = (NEED.least + NEED.blocks.held) // 2
    assert 0.3 < NEED.share(half) / NEED.states < 0.5
    assert by_blocks(NEED, NEED.least, 1 << 50)
    with pytest.raises(UsageError, match=r"embed_tokens.weight has"):
        by_blocks(NEED, NEED.least - 1, 1 << 50)


def test_the_plan_tells_both_figures_and_the_bytes_on_disk() -> None:
    assert NEED.line() == (
        "calibration takes 184 GB with the whole model in memory, 15.1 GB block by block (the largest is "
        "model.embed_tokens.weight, 2.1 GB; 4.24 GB with activations in files)"
    )
    assert choice(NEED, 8_000_000_000).endswith(
        "with 8 GB given: block by block, with 5.85 GB of activations in files beside the output"
    )
    assert choice(NEED, 20_000_000_000).endswith("with 20 GB given: block by block")


@pytest.mark.parametrize("memory_disk", [False, True])
def test_a_disk_without_room_is_refused_before_a_weight_is_read(
    memory_disk: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build("LlamaForCausalLM", torch.float32).save_pretrained(tmp_path)
    source = open_source(tmp_path)
    for way in ("load_model", "load_skeleton", "read", "read_rows"):
        monkeypatch.setattr(type(source), way, lambda *_: pytest.fail("a weight was read"))
    monkeypatch.setattr("bridge.calibration.walk.budget.BASE", 0)
    if memory_disk:
        monkeypatch.setattr(states, "in_memory", lambda _: True)
    else:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1000, 0, 1000))
    why = (
        "lies in memory, too; give memory=" if memory_disk else r"has 1 kB free, and .* activations there; give memory="
    )
    many = [{"input_ids": batch["input_ids"]} for batch in batches() * 20]
    with pytest.raises(UsageError, match=why):
        bridge.calibrate(tmp_path, "fp8", many, memory=300_000, partial=tmp_path / "partial")


@pytest.mark.parametrize(
    ("quant", "partial", "what"),
    [
        ("int4_gptq", None, "chosen codes"),
        ("fp8", "kept", "activations"),
        ("int4_gptq", "kept", "activations and chosen"),
    ],
)
def test_a_disk_without_room_for_codes_or_finished_blocks_is_refused_before_a_weight_is_read(
    quant: str, partial: str | None, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory holds all activations, so that none is spilled."""
    build("LlamaForCausalLM", torch.float32).save_pretrained(tmp_path)
    source = open_source(tmp_path)
    monkeypatch.setattr("bridge.calibration.walk.budget.BASE", 0)
    scheme = load_scheme(quant)
    data = prepare(batches(), source)
    way = choose_strategy(CalibrationJob(source, structure_of(source), scheme, data, free=1 << 40))
    assert way.need.blocks.held < way.need.whole
    for name in ("load_model", "load_skeleton", "read", "read_rows"):
        monkeypatch.setattr(type(source), name, lambda *_: pytest.fail("a weight was read"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1000, 0, 1000))
    with pytest.raises(UsageError, match=rf"has 1 kB free, and .* of {what}.* there; give memory="):
        bridge.calibrate(
            tmp_path, quant, batches(), memory=way.need.blocks.held, partial=tmp_path / partial if partial else None
        )


def test_codes_in_memory_need_room_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "in_memory", lambda _: True)
    assert states.spill_to(tmp_path, share=0, states=0, codes=10, spare=10) is None
    with pytest.raises(UsageError, match=r"11 B of chosen codes do not fit into memory=, and .* lies in memory, too"):
        states.spill_to(tmp_path, share=0, states=0, codes=11, spare=10)


def test_what_an_earlier_run_left_needs_no_further_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1000, 0, 1000))
    with pytest.raises(UsageError, match="has 1 kB free"):
        states.spill_to(tmp_path, share=0, states=0, finished=1500)
    (tmp_path / "states-a.safetensors").write_bytes(bytes(500))
    assert states.spill_to(tmp_path, share=0, states=0, finished=1500) is None


@pytest.mark.slow
@pytest.mark.parametrize("what", ["chosen codes", "finished blocks"])
def test_a_disk_that_fills_is_told_and_the_run_goes_on_afterwards(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build("LlamaForCausalLM", torch.float32).save_pretrained(tmp_path / "model")
    source = open_source(tmp_path / "model")
    structure = structure_of(source)
    scheme, data = load_scheme("int4_gptq").bound(structure.sites), prepare(batches(), source)
    home: Any = AppendedFile if what == "chosen codes" else resume
    name = "append" if what == "chosen codes" else "_write"
    plain, calls = getattr(home, name), 0

    def full(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 9:  # in the second layer
            raise OSError(28, "No space left on device")
        return plain(*given)

    def digest(partial: Path | None) -> str:
        return calibrate_by_blocks(CalibrationJob(source, structure, scheme, data, partial=partial)).digest

    expected = digest(None)
    with monkeypatch.context() as patch:
        patch.setattr(home, name, full)
        if what == "finished blocks":
            calls = 6
        with pytest.raises(WriteError, match=rf"the disk is full while {what} were kept there; free some") as raised:
            digest(tmp_path / "partial")
    assert "goes on from there" in "".join(raised.value.__notes__)
    assert digest(tmp_path / "partial") == expected


@pytest.mark.slow
def test_memory_decides_what_goes_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build("LlamaForCausalLM", torch.float32).save_pretrained(tmp_path)
    many = [{"input_ids": batch["input_ids"]} for batch in batches() * 20]
    expected = bridge.calibrate(tmp_path, "fp8", many).digest
    monkeypatch.setattr("bridge.calibration.walk.budget.BASE", 0)
    written: list[int] = []
    write = Spill._written
    monkeypatch.setattr(Spill, "_written", lambda self, it: (written.append(it.nbytes()), write(self, it))[1])
    assert bridge.calibrate(tmp_path, "fp8", many, memory=300_000).digest == expected
    assert sum(written) > 300_000


@pytest.mark.slow
def test_a_walk_that_nobody_asked_for_is_told_with_both_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    build("LlamaForCausalLM", torch.float32).save_pretrained(tmp_path)
    bridge.calibrate(tmp_path, "fp8", batches(), memory=10_000_000_000)
    assert not [it for it in recwarn if issubclass(it.category, BridgeWarning)]
    monkeypatch.setattr("bridge.calibration.walk.budget.BASE", 0)
    monkeypatch.setattr("bridge.calibration.calibrate.available_memory", lambda: 400_000)
    with pytest.warns(BridgeWarning, match=r"runs block by block, because the whole model takes .* blocks take"):
        bridge.calibrate(tmp_path, "fp8", batches())
