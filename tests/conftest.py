"""What holds for every test: traced structures stay out of the user's cache; workers leave each other cores and share
what is made once a run.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import closure, kept_graphs, once, rows, seconds

# One worker a core: torch's threads would only wait for each other. torch reads this when it is imported.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session", autouse=True)
def shared_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One directory for all workers of a run: traced structures, and what `tests.once` makes."""
    base = tmp_path_factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    root.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        patch.setattr(once, "ROOT", root)
        patch.setenv(once.VARIABLE, str(root))
        yield root


@pytest.fixture(scope="module", autouse=True)
def no_idle_ranks() -> Iterator[None]:
    """Processes of megatron-core end with the file that asked them: twenty idle ones took half a core."""
    yield
    if oracle := sys.modules.get("tests.oracles.megatron_oracle"):
        oracle.close()


@pytest.fixture(scope="session")
def graphs_once(shared_directory: Path) -> Iterator[None]:
    """The float graph of a config is loaded, or exported once a run: no weight, scheme or calibration decides it."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    from bridge.targets.onnx.export import export
    from tests.models.graphs import export_once

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "export_graph", export_once)
        # torch gathers its translations for each export anew, in most of a second
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(functools.cache(ONNXRegistry.from_torchlib)))
        yield


@pytest.fixture(autouse=True)
def exports_once(request: pytest.FixtureRequest) -> None:
    """`graphs_once` for every test that has torch: exporting takes seconds, and many files convert the same model."""
    if "torch" in sys.modules:
        request.getfixturevalue("graphs_once")


# Files that go to one worker, since they share what is costly to start or to make; every other file is its own group.
GROUPS = {
    "forks": (
        "tests/docs/test_examples.py", "tests/docs/test_site.py", "tests/browser/test_site.py", "tests/test_readme.py",
        "tests/test_forks.py", "tests/calibration/walk/test_workers.py", "tests/calibration/walk/test_resume.py",
        "tests/workflows/distill/test_distill.py", "tests/workflows/chain/test_chain.py",
    ),
    "diffusers": ("tests/targets/hf/test_diffusion.py", "tests/targets/trt/test_denoisers.py"),
    "graphs": (
        "tests/targets/onnx/export/test_export.py", "tests/targets/onnx/write/test_sites.py",
        "tests/targets/trt/test_trt_oracle.py",
    ),
    "server": (  # tests/oracles/server.py
        "tests/sources/test_megatron.py", "tests/sources/test_megatron_untrusted.py", "tests/sources/test_oracles.py",
        "tests/sources/quantized/test_megatron.py",
        "tests/sources/dialects/test_megatron_names.py", "tests/targets/dcp/test_megatron.py",
        "tests/sources/weights/test_dcp_megatron.py", "tests/workflows/inspect/test_layers.py",
        "tests/workflows/inspect/test_dialects.py", "tests/workflows/inspect/test_ranks.py",
        "tests/compat/test_nemo_distill.py", "tests/compat/test_nemo_prune.py",
        "tests/compat/test_live_megatron.py", "tests/workflows/prune/test_modelopt_prune.py",
        "tests/sources/configs/test_configs.py", "tests/sources/weights/test_dcp.py",
        "tests/sources/test_torchtitan.py", "tests/sources/test_meta.py", "tests/targets/dcp/test_torchtitan.py",
    ),
}  # fmt: skip


def _group(nodeid: str) -> str:
    file = nodeid.partition("::")[0]
    return next((group for group, files in GROUPS.items() if file in files), file)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seconds", action="store_true", help="measure processor seconds, and fail above the budget")
    parser.addoption("--changed", action="store_true", help="only test files that the changes since HEAD can reach")


def pytest_configure(config: pytest.Config) -> None:
    """Nearly all that tests make is freed without a search for garbage; one each 700 objects took a third of some."""
    gc.set_threshold(50_000, 20, 50)
    seconds.register(config)
    closure.register(config)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Modules and items live as long as the run: looking for garbage among them took a fifth of collecting, and three
    seconds of each test that asks for it.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A group goes to one worker. `--dist loadgroup` would do it, but xdist 3.8 renames items where pytest 9.2 looks
    no more.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid)

    return ByGroup(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Groups with many slow tests begin first, so that no worker is left alone with one at the end."""
    rows.mark(items)
    groups = [_group(item.nodeid) for item in items]
    slow = Counter(
        group for group, item in zip(groups, items, strict=True) if item.get_closest_marker("slow") is not None
    )
    first = {group: at for at, group in reversed(list(enumerate(groups)))}
    order = sorted(range(len(items)), key=lambda at: (-slow[groups[at]], first[groups[at]], at))
    items[:] = [items[at] for at in order]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Graphs that `make test` does not need are not kept."""
    kept_graphs.needed_later = item.get_closest_marker("product") is not None


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    """Say how many float graphs were loaded and exported."""
    if factory := getattr(config, "_tmp_path_factory", None):
        for line in kept_graphs.report(factory.getbasetemp() / "shared", exitstatus == 0):
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def tp() -> Any:
    """nvtripy: on its own runtime if that and a GPU are there, else on `tests/oracles/tripy_runtime`."""
    from tests.oracles.tripy_runtime import install

    return install()


@pytest.fixture
def stand_in(tp: Any) -> Any:
    """nvtripy on the stand-in, for what an engine does in another way or does not check."""
    from tests.oracles.tripy_runtime import is_stand_in

    return tp if is_stand_in() else pytest.skip("nvtripy has its own runtime here")
