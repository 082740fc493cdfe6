"""Run Transformer Engine's own tests of its debug features on the stand-in.

`python -m tests.oracles.te_runtime.upstream DIR [--door] [FILE ...]`: DIR is tests/pytorch/debug of its repository,
whose files are not on PyPI; FILE names some of them. With `--door`, bridge's door answers under the name
`nvdlfw_inspect.api`. Other words, `-k` among them, go to pytest.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import tempfile
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.oracles.te_runtime.start import HOME, start

CONFIG = "test_config"  # about classes of nvdlfw-inspect that the door has not
FILES = (CONFIG, "test_api_features", "test_perf", "test_log", "test_sanity", "test_numerics")
FEATURES = HOME / "transformer_engine" / "debug" / "features"
DUMMY = "_test_dummy_feature.py"  # in that folder, though only tests use it


def main() -> int:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("dir", type=lambda given: Path(given).resolve(strict=True))
    words.add_argument("files", nargs="*", metavar="FILE", help=f"of {', '.join(FILES)}; all")
    words.add_argument("--door", action="store_true")
    given, more = words.parse_known_args()
    start()
    codes = []
    # Each in a process of its own, as theirs runs them: some leave the engine on.
    for name in given.files or [name for name in FILES if not (given.door and name == CONFIG)]:
        print(name, flush=True)
        process = multiprocessing.get_context("fork").Process(target=run, args=(given.dir, name, given.door, more))
        process.start()
        process.join()
        codes.append(process.exitcode)
    return int(any(codes))


def run(home: Path, name: str, door: bool, more: list[str]) -> None:
    """Run one file and exit with pytest's code."""
    import torch

    from tests.oracles.te_runtime.process import by_door

    warnings.simplefilter("ignore")
    random.seed(0)  # they draw a part of their combinations
    torch.manual_seed(0)
    approx: Any = pytest.approx
    pytest.approx = lambda value, **more: approx(getattr(value, "item", lambda: value)(), **more)  # 8.2 took tensors
    with tempfile.TemporaryDirectory() as logs, by_door() if door else nullcontext():
        os.chdir(logs)
        features = [str(FEATURES)]
        if door:
            features.append(_dummy(Path(logs)))
            _tell_from_door()
        code = pytest.main([
            str(home / f"{name}.py"), "-c", os.devnull, f"--rootdir={home}", f"--configs_dir={home}/test_configs/",
            "--feature_dirs", *features, "-q", "-rfEs", "--disable-warnings", "-p", "no:cacheprovider", *more,
        ])  # fmt: skip
    raise SystemExit(code)


def _dummy(folder: Path) -> str:
    """A folder with the class that counts calls: of Transformer Engine's own folder the door loads nothing."""
    made = folder / "dummy"
    made.mkdir()
    (made / DUMMY).symlink_to(FEATURES / DUMMY)
    return str(made)


def _tell_from_door() -> None:
    """What tests read from `STATS_BUFFERS.log_stats()` comes from the door, by layer, tensor, statistic and step."""
    import torch
    from transformer_engine.debug.features.utils.stats_buffer import STATS_BUFFERS

    import bridge
    from bridge.workflows.inspect.dlfw.engine import Engine

    seen, steps = Engine.inspect_tensor, [0]

    def noting(self: Engine, *given: Any, iteration: int = 0, **words: Any) -> None:
        steps.append(iteration)
        seen(self, *given, iteration=iteration, **words)

    def told() -> dict[tuple[str, str, str, int], Any]:
        records = bridge.dlfw.DEBUG_MANAGER.engine.records(steps[-1])
        return {(one.layer, one.tensor, one.stat, one.step): torch.tensor(one.value) for one in records}

    Engine.inspect_tensor, STATS_BUFFERS.log_stats = noting, told


if __name__ == "__main__":
    raise SystemExit(main())
