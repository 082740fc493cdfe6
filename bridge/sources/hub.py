"""Download the snapshot of a hub id, or take the cached one."""

from __future__ import annotations

import errno
import re
from pathlib import Path

from bridge.core.errors import SourceError

HUB_ID = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?)(@(?P<revision>[\w./-]+))?")
# By exclusion, because a file that is not fetched is lost: weights of other frameworks, pickles at first, and code.
OTHER_WEIGHTS = [
    "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.onnx", "*.onnx_data", "*.gguf", "*.ot", "*.npz",
    "*.pkl", "*.tflite", "*.mlmodel", "*.mlpackage/*", "*.nemo", "*.py", "consolidated*.safetensors", "original/*",
    "onnx/*", "openvino/*", "coreml/*",
]  # fmt: skip
LOCAL = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)  # errors of the own disk
BIN = ["pytorch_model*.bin", "pytorch_model*.bin.index.json"]


def snapshot(model: str | Path) -> Path:
    """Return the local directory of a hub id (`org/name`, `org/name@revision`); SourceError if it cannot be had."""
    root = fetched(model, None, "", OTHER_WEIGHTS)
    return root if any(root.glob("*.safetensors")) else fetched(model, BIN)


def fetched(model: str | Path, allow: list[str] | None, where: str = "", ignore: list[str] | None = None) -> Path:
    """Return the local directory of some files of a hub id. `where` comes before the messages."""
    text = str(model)
    match = HUB_ID.fullmatch(text)
    if isinstance(model, Path) or match is None or text.endswith((".nemo", ".safetensors", ".bin", ".gguf")):
        raise SourceError(f"{where}{text}: no such directory, and not a hub id either (org/name); check the path")
    return _download(f"{where}{text}", match["id"], match["revision"], allow, ignore)


def _download(text: str, name: str, revision: str | None, allow: list[str] | None, ignore: list[str] | None) -> Path:
    from huggingface_hub import errors, snapshot_download

    def fetch(offline: bool) -> Path:
        root = snapshot_download(
            name, revision=revision, allow_patterns=allow, ignore_patterns=ignore, local_files_only=offline
        )
        return Path(root)

    try:
        try:
            return fetch(offline=False)
        except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
            raise
        except OSError as error:
            if error.errno in LOCAL:  # the hub answers
                raise SourceError(f"{text}: cannot be written here: {error.strerror} ({error.filename})") from error
            return fetch(offline=True)
    except (OSError, errors.HFValidationError) as error:  # those of the hub are OSErrors
        whys: dict[type[Exception], str] = {
            errors.GatedRepoError: f"the hub asks for access rights to {name}; request them and `hf auth login`",
            errors.RevisionNotFoundError: f"{name} on the hub has no revision {revision!r}",
            errors.RepositoryNotFoundError: f"the hub has no (public) model {name}; check spelling, or `hf auth login`",
            errors.HFValidationError: f"not a valid hub id: {error}",
            OSError: f"the hub cannot be reached, nor does its cache hold {name}; check path, network, HF_HUB_OFFLINE",
        }
        why = next(words for kind, words in whys.items() if isinstance(error, kind))
        raise SourceError(f"{text}: no such directory here, and {why}") from error
