"""The catalogue of errors: every class, with a message that was provoked while the site was built."""

from __future__ import annotations

import inspect
import json
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import chdir
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import bridge
from bridge.core.errors import BridgeError
from docs.generate.targets import MODEL

SOURCE = "tiny-llama"


@dataclass(frozen=True)
class Example:
    """A call that fails, run in a directory with the tiny Llama, and the remedy."""

    call: str
    provoke: Callable[[], object]
    remedy: str


def _pointer() -> None:
    Path("cloned").mkdir()
    Path("cloned/config.json").write_text((MODEL / "config.json").read_text())
    Path("cloned/model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n")
    bridge.plan("cloned", "hf", "int8_wo")


def _refused() -> None:
    """Ask a local server that answers 403."""
    from http.server import BaseHTTPRequestHandler, HTTPServer
    from threading import Thread

    class Closed(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(403)

        do_HEAD = do_GET

        def log_message(self, *said: object) -> None:
            """Keep the log of the build clean."""

    with HTTPServer(("127.0.0.1", 0), Closed) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        here = f"http://127.0.0.1:{server.server_port}"
        try:
            bridge.plan(f"{here}/llama", "hf", "int8_wo")
        except BridgeError as error:
            raise type(error)(str(error).replace(here, "https://models.example")) from error
        finally:
            server.shutdown()


def _row() -> None:
    from bridge.core.mappings import mappings, parse_table
    from bridge.tables.architectures.arch import parse_arch
    from bridge.tables.architectures.roles import load_roles

    text = (mappings() / "arch" / "llama.toml").read_text().replace('"attn.q.weight"', '"attn.qq.weight"')
    parse_arch(parse_table(text, "mine.toml"), load_roles())


def _recipe() -> None:
    Path("mixed.toml").write_text('base = "int8_wo"\n[[rule]]\nroles = ["mlp.dwn.weight"]\nquant = "none"\n')
    bridge.plan(SOURCE, "hf", "mixed.toml")


def _resized() -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(SOURCE)
    source = bridge.tensors(model, "vllm", "fp8_pc_pt")
    model.lm_head.weight.data = model.lm_head.weight.data[:1000]
    dict(source)


def _export() -> None:
    from bridge.targets.onnx.export.export import export_graph

    config = json.loads((MODEL / "config.json").read_text())
    export_graph(config | {"hidden_act": "no_such_activation"})


def _exists() -> None:
    Path("results").mkdir()
    Path("results/mine.txt").write_text("")
    bridge.convert(SOURCE, "hf", "int8_wo", "results", overwrite=True)


def _no_model() -> None:
    Path("empty").mkdir()
    bridge.verify("empty", SOURCE)


def _short() -> None:
    Path("short.txt").write_text("Once upon a time")
    bridge.convert(SOURCE, "hf", "fp8", "out", calib="short.txt")


def _not_here() -> None:
    from bridge.targets import load_target

    load_target("trtllm").runtime(Path("out"))


def _batch() -> None:
    rows = '[[row]]\nmodel = "tiny-llama"\ntarget = "megatron"\nquant = "fp8"\nout = "out"\n'
    Path("models.toml").write_text(f"strict = true\n{rows}")
    bridge.batch("models.toml")


def _inspect() -> None:
    from bridge.workflows.inspect.te.read import read_config

    section = {"enabled": True, "layers": {"layer_type": "all"}, "bridge": {"LogTensorStat": {"enabled": True}}}
    read_config({"everything": section})


def _nemo(**config: object) -> None:
    from bridge.compat import PruningConfig, prune_language_model

    prune_language_model(SOURCE, PruningConfig(**config))


def _cast() -> None:
    import numpy as np

    from bridge.compat import per_block_cast_to_fp8

    per_block_cast_to_fp8(np.ones((2, 128)))


EXAMPLES: dict[str, Example] = {
    "BatchError": Example(
        'bridge.batch("models.toml")   # strict = true, and a row that its target refuses',
        _batch,
        "Correct the rows that the message names. Without `strict` the other rows run.",
    ),
    "QuantizerError": Example(
        'bridge.Quantizer({"algorithm": "fp9"}, {"save_path": "out"})',
        lambda: bridge.Quantizer({"algorithm": "fp9"}, {"save_path": "out"}),
        "Correct the two configs. It is an `AssertionError` too, as in NeMo.",
    ),
    "PruningValueError": Example(
        "PruningConfig(drop_layers=[4], target_num_layers=4)   # of bridge.compat",
        lambda: _nemo(drop_layers=[4], target_num_layers=4),
        "Name the layers, or their number. It is a `ValueError` too, as in NeMo.",
    ),
    "PruningTypeError": Example(
        'PruningConfig(drop_layers="12")',
        lambda: _nemo(drop_layers="12"),
        "Give whole numbers. It is a `TypeError` too.",
    ),
    "DtypeError": Example(
        "per_block_cast_to_fp8(numpy.ones((2, 128)))   # of bridge.compat, an array of float64",
        _cast,
        "Give bfloat16 (as uint16 in NumPy), float16 or float32, and leave `dtype` out or name the same. It is a "
        "`TypeError` too.",
    ),
    "PruningAssertionError": Example(
        'prune_language_model("tiny-llama", PruningConfig(target_num_attention_heads=4))',
        lambda: _nemo(target_num_attention_heads=4),
        "Give what the message names. It is an `AssertionError` too, as in NeMo and ModelOpt.",
    ),
    "PruningSizeError": Example(
        'prune_language_model("tiny-llama", PruningConfig(drop_layers=[99]))',
        lambda: _nemo(drop_layers=[99]),
        "Give sizes and layers that the model has. It is an `AssertionError` too, as in ModelOpt.",
    ),
    "UnknownMode": Example(
        'bridge.modelopt_quantize(model, "fp9")',
        lambda: bridge.modelopt_quantize(None, "fp9"),
        "Use one of the three modes of Tripy's example, or `bridge.convert` for all schemes.",
    ),
    "NoSuchAttribute": Example(
        'bridge.get_submodule(model, "transformer.h.0")',
        lambda: bridge.get_submodule(Path(), "parent.h.0"),
        "Correct the path from the part that the message names.",
    ),
    "UsageError": Example(
        'bridge.plan("tiny-llama", "trtt")',
        lambda: bridge.plan(SOURCE, "trtt"),
        "Correct the name. The message lists the known names and the nearest one.",
    ),
    "TableError": Example(
        "qbridge check mine.toml",
        _row,
        "Correct the row that the message quotes, and run `qbridge check` on the table again.",
    ),
    "SourceError": Example(
        'bridge.plan("cloned", "hf", "int8_wo")   # a clone without git-lfs',
        _pointer,
        "Repair or fetch the checkpoint. One message lists all problems of its headers and its config.",
    ),
    "RefusedError": Example(
        'bridge.plan("https://models.example/llama", "hf", "int8_wo")',
        _refused,
        "Ask for access, or set the credentials that the message names.",
    ),
    "SchemeError": Example(
        'bridge.plan("tiny-llama", "hf", "mixed.toml")',
        _recipe,
        "Correct the recipe, or choose a scheme that the target takes (`qbridge show schemes`).",
    ),
    "PlanError": Example(
        'bridge.plan("tiny-llama", "trtllm", config={"architectures": ["OlmoForCausalLM"], "model_type": "olmo"})',
        lambda: bridge.plan(SOURCE, "trtllm", config={"architectures": ["OlmoForCausalLM"], "model_type": "olmo"}),
        "No weight was read and nothing was written. Change what the message names, or use the target it suggests.",
    ),
    "CalibrationError": Example(
        'bridge.convert("tiny-llama", "hf", "fp8", "out", calib="short.txt")',
        _short,
        "Give more data, other data, or a calibration of this model.",
    ),
    "LiveError": Example(
        "for name, tensor in source: ...  # the head lost rows since bridge.tensors",
        _resized,
        "Call `bridge.tensors` again; the server needs a new start, too.",
    ),
    "TrainingError": Example(
        'bridge.distill("tiny-llama", "tiny-llama", out="trained", memory="1MB")',
        lambda: bridge.distill(SOURCE, SOURCE, out="trained", memory="1MB"),
        "Give more memory, a smaller learning rate, or a teacher with the student's vocabulary, as the message says.",
    ),
    "ExportError": Example(
        'bridge.convert(..., target="trt")   # a config whose activation transformers does not have',
        _export,
        "Targets without a graph (`hf`) may take the model. The message says what torch could not trace.",
    ),
    "WriteError": Example(
        'bridge.convert("tiny-llama", "hf", "int8_wo", "results", overwrite=True)',
        _exists,
        "Choose another directory, free space, or wait for the other run. Existing files are unchanged.",
    ),
    "VerifyError": Example(
        'bridge.verify("empty", "tiny-llama")',
        _no_model,
        "Give the directory that `convert` wrote, and the model that was converted.",
    ),
    "InspectError": Example(
        'read_config("config.yaml")   # of bridge.workflows.inspect.te',
        _inspect,
        "Correct the lines that the message names. It lists all mistakes of the file, before a model is loaded.",
    ),
    "GoldenError": Example(
        'bridge.golden.check("empty", "out")',
        lambda: bridge.golden.check("empty", "out"),
        "Record the golden again from a model that passed, with `--reason`.",
    ),
    "CannotRun": Example(
        "qbridge verify out --against tiny-llama   # out is of target trtllm",
        _not_here,
        "The weights are compared anyway. Run the model on a machine that has its runtime.",
    ),
    "EngineUnavailable": Example(
        'bridge.plan("tiny-llama", "trt", "fp8", engine=True)',
        lambda: bridge.plan(SOURCE, "trt", "fp8", engine=True),
        "Build the engine on a machine with TensorRT and a GPU. trtexec.txt beside the model has the command.",
    ),
}


def classes() -> Iterator[type[BridgeError]]:
    """Every class of errors that a user can meet: each base class, then its subclasses by name."""
    package = Path(bridge.__file__).parent
    for path in package.rglob("*.py"):
        if re.search(r"^class \w+\((?:\w+Error|CannotRun)\b", path.read_text(encoding="utf-8"), re.MULTILINE):
            import_module(".".join(path.relative_to(package.parent).with_suffix("").parts))
    yield from dict.fromkeys(_below(BridgeError))


def _below(base: type[BridgeError]) -> Iterator[type[BridgeError]]:
    for found in sorted(base.__subclasses__(), key=lambda kind: kind.__name__):
        if found.__module__.startswith("bridge."):
            yield found
            yield from _below(found)


def message(name: str) -> str:
    """The message that the command prints for the example of a class."""
    with tempfile.TemporaryDirectory() as work, chdir(work):
        Path(SOURCE).symlink_to(MODEL)
        try:
            EXAMPLES[name].provoke()
        except BridgeError as error:
            assert type(error).__name__ == name, f"the example of {name} gives {type(error).__name__}: {error}"
            return f"{name}: {error}"
    raise AssertionError(f"the example of {name} gives no error")


def catalogue() -> str:
    """A section for each class: when it is raised, its exit code, a real message, what to do."""
    parts = []
    for kind in classes():
        name, base = kind.__name__, kind.__mro__[1].__name__
        example = EXAMPLES[name]
        parts += [
            f"## `{name}`",
            f"{inspect.cleandoc(kind.__doc__ or '')}",
            f"Exit code {kind.exit_code}; a `{base}`. {example.remedy}",
            f"```text\n{example.call}\n\n{message(name)}\n```",
        ]
    return "\n\n".join(parts)
