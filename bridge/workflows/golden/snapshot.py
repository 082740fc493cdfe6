"""A written directory as a snapshot: every tensor of every weight file hashed and sampled, every other file hashed.

It must never tell of the run that wrote it (times, paths, threads): what `bridge` keeps beside a model for people and
for itself is left out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from bridge.budget import cores
from bridge.container import SafetensorsFile
from bridge.finish import load_manifest
from bridge.golden.digests import Digest, digest_file, digest_tensor
from bridge.golden.origins import origins_of
from bridge.golden.values import File, Key, Made, Origin, Snapshot, Statistics, Tensor
from bridge.planning import WRITES
from bridge.progress import BYTES, Progress, quiet
from bridge.reading import Buffers
from bridge.remote.threads import readers
from bridge.values import TensorSpec
from bridge.written import open_written

T = TypeVar("T")
R = TypeVar("R")

# The model card tells what was measured, if it was; a TensorRT engine is another one each time that it is built.
LEFT_OUT = tuple({*WRITES, "README.md", "*.engine"})
DIGESTED = BYTES[-1]


class Written:
    """A directory that `convert` wrote, open for reading; a damaged file is an error, a missing one has no tensors."""

    def __init__(self, directory: Path, progress: Progress = quiet) -> None:
        self.directory = directory
        self.plan = load_manifest(directory).plan
        self._progress = progress
        self._files = {
            name: open_written(directory / name, self.plan) for name in self.plan.files if (directory / name).is_file()
        }
        self._specs = {(file, name): spec for file, held in self._files.items() for name, spec in held.specs.items()}

    @cached_property
    def origins(self) -> Mapping[Key, Origin]:
        """How each tensor came to be."""
        return origins_of(self.plan)

    def snapshot(self, statistics: bool = False) -> Snapshot:
        """Read the whole directory once."""
        digests = self._digest(self._specs, statistics)
        origins = {key: self.origins[key] if key in self.origins else Origin(key[1]) for key in self._specs}
        ids = {origin: origin.id for origin in dict.fromkeys(origins.values())}
        tensors = {
            key: Tensor(spec.name, key[0], spec.shape, spec.dtype, digest.hash, ids[origins[key]], digest.statistics)
            for key, spec in self._specs.items()
            for digest in [digests[key]]
        }
        samples = {key: digest.sample for key, digest in digests.items()}
        return Snapshot(self.made, tensors, self._beside(), {id_: origin for origin, id_ in ids.items()}, samples)

    def statistics(self, keys: Iterable[Key]) -> dict[Key, Statistics]:
        """Statistics of some tensors, which are read once more."""
        found = self._digest({key: self._specs[key] for key in keys}, True)
        return {key: digest.statistics for key, digest in found.items() if digest.statistics}

    @property
    def made(self) -> Made:
        """What the plan says that decides the bytes."""
        plan = self.plan
        return Made(plan.target, plan.architecture, plan.scheme, plan.scheme_digest, plan.digest, plan.options)

    def _digest(self, specs: Mapping[Key, TensorSpec], statistics: bool) -> dict[Key, Digest]:
        total, done, lock = sum(spec.nbytes for spec in specs.values()), [0], threading.Lock()

        def one(key: Key, buffers: Buffers) -> Digest:
            digest = digest_tensor(self._files[key[0]], specs[key], buffers, statistics)
            with lock:
                done[0] += specs[key].nbytes
                self._progress(done[0], total, DIGESTED)
            return digest

        largest = sorted(specs, key=lambda key: -specs[key].nbytes)  # so that no thread begins a long one last
        return dict(zip(largest, _by_threads(one, largest, self.directory), strict=True))

    def _beside(self) -> dict[str, File]:
        paths = {path.relative_to(self.directory).as_posix(): path for path in self.directory.rglob("*")}
        names = sorted(
            name for name, path in paths.items() if path.is_file() and not any(fnmatchcase(name, g) for g in LEFT_OUT)
        )

        def one(name: str, buffers: Buffers) -> File:
            path, held = paths[name], self._files.get(name)
            size = path.stat().st_size
            if held is None:
                return File(name, size, digest_file(path, buffers))
            if not isinstance(held, SafetensorsFile):
                return File(name, size, "", header=True)  # its index is a file of its own
            begin = min((entry.offset for entry in held.header.entries.values()), default=size)
            return File(name, size, digest_file(path, buffers, begin), header=True)

        return dict(zip(names, _by_threads(one, names, self.directory), strict=True))


def _by_threads(work: Callable[[T, Buffers], R], items: list[T], directory: Path) -> list[R]:
    """Results of `work` on what lies in a directory, in order; each thread has buffers of its own."""
    own = threading.local()

    def one(item: T) -> R:
        if not hasattr(own, "buffers"):
            own.buffers = Buffers()
        return work(item, own.buffers)

    with readers(cores(), directory) as pool:
        return list(pool.map(one, items))
