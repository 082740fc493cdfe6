"""Chains: what is refused, what is kept, and that the example works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import bridge
from bridge.core.errors import BridgeError, UsageError
from bridge.workflows.chain.notes import NOTE
from tests import forks
from tests.calibration.walk.test_workers import free_port
from tests.cli.test_cli import run

ROOT = Path(__file__).resolve().parents[3]
LLAMA = (ROOT / "examples/models/tiny-llama").as_posix()
CHAIN = f"""
out = "made"
[[step]]
name  = "pruned"
verb = "prune"
model = "{LLAMA}"
keep  = {{ ffn = 128 }}
importance = "weights"
[[step]]
name    = "trained"
verb    = "distill"
student = "{{pruned}}"
teacher = "{LLAMA}"
steps   = 6
batch   = 2
sequence = 48
lr      = 1e-3
save_every = 2
[[step]]
name  = "coded"
verb  = "convert"
model = "{{trained}}"
target = "hf"
quant = "int8_wo"
"""


def written(folder: Path, text: str = CHAIN) -> Path:
    path = folder / "chain.toml"
    path.write_text(text)
    return path


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {
        name: (folder / "made" / name / "model.safetensors").read_bytes() for name in ("pruned", "trained", "coded")
    }


@pytest.mark.slow
def test_a_killed_chain_goes_on_in_its_step(tmp_path: Path) -> None:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole = bridge.chain(written(tmp_path / "whole"), progress=False)
    assert whole.passed and [step.kept for step in whole.steps] == [False] * 3
    assert whole.steps[1].perplexity and whole.steps[1].perplexity[1] < whole.steps[1].perplexity[0]

    def stop(done: int, total: int, stage: str) -> None:
        if stage == "trained: train" and done == 5:
            raise KeyboardInterrupt

    path = written(tmp_path / "killed")
    with pytest.raises(KeyboardInterrupt):
        bridge.chain(path, progress=stop)
    trained: list[int] = []
    again = bridge.chain(path, progress=lambda done, _, stage: trained.append(done) if "train" in stage else None)
    assert [step.kept for step in again.steps] == [True, False, False]
    assert [done for done in trained if done][:2] == [5, 6]
    assert bytes_of(tmp_path / "whole") == bytes_of(tmp_path / "killed")
    third = bridge.chain(path, progress=False)
    assert [step.kept for step in third.steps] == [True] * 3
    assert third.steps[1].seconds == pytest.approx(again.steps[1].seconds, abs=1e-3)
    assert not list((tmp_path / "killed/made").glob(".*"))
    other = bridge.chain(written(tmp_path / "killed", CHAIN.replace("int8_wo", "fp8")), progress=False)
    assert [step.kept for step in other.steps] == [True, True, False]
    earlier = bridge.chain(written(tmp_path / "killed", CHAIN.replace("128", "192")), progress=False)
    assert [step.kept for step in earlier.steps] == [False] * 3


@pytest.mark.slow
def test_an_output_that_was_published_unnoted_is_kept(tmp_path: Path) -> None:
    text = CHAIN.partition('[[step]]\nname    = "trained"')[0]
    path = written(tmp_path, text)
    bridge.chain(path, progress=False)
    note = tmp_path / "made/pruned" / NOTE
    note.rename(tmp_path / "made/.pruned.step.json")  # as if it was killed before the note was written
    assert [step.kept for step in bridge.chain(path, progress=False).steps] == [True]
    assert note.is_file()
    note.unlink()
    with pytest.raises(UsageError, match="step pruned of this chain did not make it"):
        bridge.chain(path, progress=False)
    assert bridge.chain(path, overwrite=True, progress=False).passed


CASES = [
    ("verb = \"prune\"", "verb = \"quantise\"", "verb = 'quantise'; known: convert, distill, prune"),
    ("{pruned}", "{prune}", "names no step above; known: pruned"),
    ("steps   = 6", "steeps = 6", "`steeps` is no argument of distill"),
    ("steps   = 6", "resume = false", "`resume` is not an argument of a step"),
    ("name    = \"trained\"", "name = \"pruned\"", "name = 'pruned' is given twice"),
    ("name  = \"pruned\"", "name = \"../up\"", "expected letters, digits"),
    ("out = \"made\"", "out = \"s3://bucket\"", "expected a local folder"),
    ("out = \"made\"", "outs = \"made\"", "key `outs` is unknown"),
    ("target = \"hf\"", "", "`target` is missing; convert needs it"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "said"), CASES, ids=[new or "no target" for _, new, _ in CASES])
def test_what_is_wrong_is_refused_before_a_step_runs(old: str, new: str, said: str, tmp_path: Path) -> None:
    assert CHAIN.count(old) >= 1
    with pytest.raises(UsageError) as raised:
        bridge.chain(written(tmp_path, CHAIN.replace(old, new, 1)))
    assert said in str(raised.value), raised.value
    assert [path.name for path in tmp_path.iterdir()] == ["chain.toml"]


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    text = CHAIN.replace("out = ", "outs = ").replace('verb    = "distill"', 'verb = "train"')
    with pytest.raises(UsageError, match=r"(?s)outs.*step trained: verb = 'train'[^\n]*$"):
        bridge.chain(written(tmp_path, text))  # and none of the step that takes its output


def test_the_command_refuses_what_a_chain_does_not_read(tmp_path: Path) -> None:
    path = str(written(tmp_path, CHAIN))
    assert "takes no text" in run("run", path, "hello").stderr
    refused = run("run", path, "--image", "cat.png")
    assert refused.exit_code == 2 and "takes no --image; leave it out" in refused.stderr


def test_a_file_that_is_no_chain_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="it has no"):
        bridge.chain(written(tmp_path, ""))
    with pytest.raises(UsageError, match="no chain of steps can be read"):
        bridge.chain(tmp_path / "none.toml")
    with pytest.raises(UsageError, match="no chain of steps can be read"):
        bridge.chain(written(tmp_path, "= 3"))


@pytest.mark.slow
def test_the_command_runs_a_chain(tmp_path: Path) -> None:
    path = written(tmp_path, CHAIN.partition('[[step]]\nname    = "trained"')[0])
    result = run("run", str(path))
    assert result.exit_code == 0 and "1 step, all passed" in result.stdout
    told: dict[str, Any] = json.loads(run("run", str(path), "--json").stdout)
    assert told["passed"] and told["steps"][0]["kept"]
    assert "give the text that" in run("run", LLAMA).stderr


@pytest.mark.product  # a minute and a half; each step has tests of its own
def test_the_example_makes_a_smaller_model(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "examples/shrink.py", "--quick", "--out", str(tmp_path / "shrunk")],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=ROOT, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = {
        line.split()[0]: line.split()
        for line in done.stdout.splitlines()
        if " MB " in line and "perplexity" in line and ":" not in line
    }
    perplexities = {name: float(row[2]) for name, row in rows.items()}
    megabytes = {name: float(row[3]) for name, row in rows.items()}
    assert perplexities["whole"] < perplexities["trained"] < perplexities["pruned"] < 50
    assert perplexities["coded"] == perplexities["onnx"] < 1.05 * perplexities["trained"]
    assert megabytes["coded"] < megabytes["pruned"] < megabytes["whole"]
    assert (tmp_path / "shrunk/shrink.svg").read_text().startswith("<svg")


def test_a_step_that_cannot_run_tells_its_own_error(tmp_path: Path) -> None:
    with pytest.raises(BridgeError, match="ffn"):
        bridge.chain(written(tmp_path, CHAIN.replace("128", "4000")), progress=False)


@pytest.mark.slow
def test_two_processes_train_and_the_first_does_the_rest(tmp_path: Path) -> None:
    """Made, kept and refused by the same two processes."""
    path = written(tmp_path, CHAIN.replace("steps   = 6", "steps = 2"))
    script = """
import sys
from pathlib import Path
import bridge
from bridge.cli.main import app
path = Path(sys.argv[1])
made = bridge.chain(path, progress=False)
print([step.kept for step in made.steps], made.steps[1].perplexity, made.passed)
for changed in (path, path.with_name("wrong.toml")):
    print("---", flush=True)
    try:
        app(["run", str(changed)])
    except SystemExit as ended:
        print("exit", ended.code)
"""
    path.with_name("wrong.toml").write_text(path.read_text().replace("int8_wo", "int9"))
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "OMP_NUM_THREADS": "1"}
    environments = [{**shared, "RANK": str(rank)} for rank in range(2)]
    both = [said for _, said in forks.together(script, ROOT, 300, [str(path)], environments)]
    (first, kept, refused), (second, silent, still) = (said.split("---\n") for said in both)
    assert first == second and first.startswith("[False, False, False]") and first.endswith("True\n")
    assert "3 steps, all passed; 3 made by an earlier run" in kept and silent == "exit 0\n"
    assert "UsageError" in refused and "step coded: --quant int9" in refused and still == "exit 2\n"
