"""Run Transformer Engine's own tests of its debug features on the stand-in.

`python -m tests.oracles.te_runtime.upstream DIR [--door | --features] [--only FILE ...]`: DIR is tests/pytorch/debug of
its repository, whose files are not on PyPI; FILE is one, as test_log. Calls are answered by nvdlfw-inspect with
Transformer Engine's features, with `--door` by bridge's door in its place, with `--features` by nvdlfw-inspect with
those of bridge. Other words, `-k` among them, go to pytest.

At d0067d0d, of August 2026, 126 pass and 5 skip themselves. By bridge 123 of 125 pass, without test_config: DumpTensors
writes safetensors, in dumps/, and `gemms: []` is a mistake in a config.
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

CONFIG = "test_config"  # about classes of nvdlfw-inspect and Transformer Engine that bridge has not
BUFFERS = "test_api_features"  # reads statistics from Transformer Engine's buffers, not from a log
FILES = (CONFIG, BUFFERS, "test_perf", "test_log", "test_sanity", "test_numerics")
FEATURES = HOME / "transformer_engine" / "debug" / "features"
DUMMY = "_test_dummy_feature.py"  # in that folder, though only tests use it


def main() -> int:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("dir", type=lambda given: Path(given).resolve(strict=True))
    words.add_argument("--only", nargs="+", choices=FILES, metavar="FILE")
    engine = words.add_mutually_exclusive_group()
    engine.add_argument("--door", action="store_const", const="door", dest="engine", default="")
    engine.add_argument("--features", action="store_const", const="features", dest="engine")
    given, more = words.parse_known_args()
    start()
    codes = []
    # Each in a process of its own, as theirs runs them: some leave the engine on.
    for name in given.only or [name for name in FILES if not (given.engine and name == CONFIG)]:
        print(name, flush=True)
        process = multiprocessing.get_context("fork").Process(target=run, args=(given.dir, name, given.engine, more))
        process.start()
        process.join()
        codes.append(process.exitcode)
    return int(any(codes))


def run(home: Path, name: str, engine: str, more: list[str]) -> None:
    """Run one file and exit with pytest's code."""
    import torch

    from bridge import dlfw
    from tests.oracles.te_runtime.process import by_door

    warnings.simplefilter("ignore")
    random.seed(0)  # they draw a part of their combinations
    torch.manual_seed(0)
    approx: Any = pytest.approx
    pytest.approx = lambda value, **more: approx(getattr(value, "item", lambda: value)(), **more)  # 8.2 took tensors
    with tempfile.TemporaryDirectory() as logs, by_door() if engine == "door" else nullcontext():
        os.chdir(logs)
        features = [str(FEATURES)]
        if engine:
            features.append(_dummy(Path(logs)) if engine == "door" else dlfw.feature_dir())
            if name == BUFFERS:
                _tell_from_bridge()
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


def _tell_from_bridge() -> None:
    """What tests read from `STATS_BUFFERS.log_stats()` comes from bridge, by layer, tensor, statistic and step."""
    import torch
    from transformer_engine.debug.features.utils.stats_buffer import STATS_BUFFERS

    from bridge.workflows.inspect.te.dlfw.engine import Engine

    seen, engines = Engine.inspect_tensor, {}

    def noting(self: Engine, *given: Any, iteration: int = 0, **words: Any) -> None:
        engines[self] = iteration
        seen(self, *given, iteration=iteration, **words)

    def told() -> dict[tuple[str, str, str, int], Any]:
        records = (record for engine, step in engines.items() for record in engine.records(step))
        return {(one.layer, one.tensor, one.stat, one.step): torch.tensor(one.value) for one in records}

    Engine.inspect_tensor, STATS_BUFFERS.log_stats = noting, told


if __name__ == "__main__":
    raise SystemExit(main())
