"""Snapshot of an output directory: tensors hashed and sampled, other files hashed.

It does not depend on the run (times, paths, threads): the report and other files of `bridge` itself are left out.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path

from bridge.core.aligned_buffers import Buffers
from bridge.core.formats.safetensors import SafetensorsFile
from bridge.core.output.names import CARD, WRITES
from bridge.core.progress import BYTES, Progress, no_progress
from bridge.core.values import TensorSpec
from bridge.streaming.rows import in_threads
from bridge.streaming.written import open_written
from bridge.targets.manifest import load_manifest
from bridge.workflows.golden.digests import Digest, digest_file, digest_tensor
from bridge.workflows.golden.origins import origins_of
from bridge.workflows.golden.values import File, Key, Made, Origin, Snapshot, Statistics, Tensor

# The model card has measurements, if there were any; each build of a TensorRT engine gives other bytes.
IGNORED = tuple({*WRITES, CARD, "*.engine"})


class SnapshotReader:
    """An output directory, open for reading; a damaged file is an error, a missing one has no tensors."""

    def __init__(self, directory: Path, progress: Progress = no_progress) -> None:
        self.directory = directory
        self.plan = load_manifest(directory).plan
        self._progress = progress
        self._files = {
            name: open_written(directory / name, self.plan) for name in self.plan.files if (directory / name).is_file()
        }
        self._specs = {(name, key): spec for name, file in self._files.items() for key, spec in file.specs.items()}

    @cached_property
    def origins(self) -> Mapping[Key, Origin]:
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
        plan = self.plan
        made = Made(plan.target, plan.architecture, plan.scheme, plan.scheme_digest, plan.digest, plan.options)
        return Snapshot(made, tensors, self._file_hashes(), {id_: origin for origin, id_ in ids.items()}, samples)

    def statistics(self, keys: Iterable[Key]) -> dict[Key, Statistics]:
        """Statistics of some tensors, which are read again."""
        digests = self._digest({key: self._specs[key] for key in keys}, True)
        return {key: digest.statistics for key, digest in digests.items() if digest.statistics}

    def _digest(self, specs: Mapping[Key, TensorSpec], statistics: bool) -> dict[Key, Digest]:
        total, done, lock = sum(spec.nbytes for spec in specs.values()), [0], threading.Lock()

        def one(key: Key, buffers: Buffers) -> Digest:
            digest = digest_tensor(self._files[key[0]], specs[key], buffers, statistics)
            with lock:
                done[0] += specs[key].nbytes
                self._progress(done[0], total, BYTES[2])
            return digest

        by_size = sorted(specs, key=lambda key: -specs[key].nbytes)  # so that no thread begins a large one last
        return dict(zip(by_size, in_threads(one, by_size, self.directory), strict=True))

    def _file_hashes(self) -> dict[str, File]:
        paths = {path.relative_to(self.directory).as_posix(): path for path in self.directory.rglob("*")}
        names = sorted(
            name for name, path in paths.items() if path.is_file() and not any(fnmatchcase(name, g) for g in IGNORED)
        )

        def one(name: str, buffers: Buffers) -> File:
            path, weights = paths[name], self._files.get(name)
            size = path.stat().st_size
            if weights is None:
                return File(name, size, digest_file(path, buffers))
            if not isinstance(weights, SafetensorsFile):
                return File(name, size, "", header=True)  # its index is a file of its own
            begin = min((entry.offset for entry in weights.header.entries.values()), default=size)
            return File(name, size, digest_file(path, buffers, begin), header=True)

        return dict(zip(names, in_threads(one, names, self.directory), strict=True))
