"""The table of flags agrees with the signatures of the verbs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import click
import pytest

import bridge
from bridge.cli.flags import FLAGS, REQUIRED, flag_of, in_flags
from bridge.cli.main import VERBS, app
from bridge.core.errors import UsageError
from bridge.workflows.batch.run import BatchOptions

FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(bridge, name) for name in VERBS if name not in ("golden", "show", "cache")},
    **{f"golden.{name}": getattr(bridge.golden, name) for name in ("record", "check", "diff")},
    "show": lambda: None,
    "cache": lambda: None,
}
PRINTED = {"json", "quiet", "verbose", "debug"}
# Flags of the command alone: it reads or writes a file itself, or prints more.
OWN = {
    "plan": {"every"},
    "calibrate": {"out", "overwrite"},
    "check": {"paths", "build", "profile"},
    "show": {"what", "every", "runtime", "dialect"},
    "sensitivity": {"out", "overwrite"},
    "inspect": {"worst"},
    "search": {"parameters", "bytes", "latency", "scores", "overwrite"},
    "cache": {"clear"},
    "run": {"overwrite", "resume"},  # of `bridge.chain`
}
# Parameters that only Python has: values that no word can name, and what the command decides itself.
PYTHON = {
    "convert": {"workers"},
    "calibrate": {"partial", "workers"},
    "inspect": {"sink"},
    "prune": {"workers"},
    "search": {"budget"},
    "run": {"stream"},
    "golden.record": {"inputs"},
}


def rows(verb: str) -> list[str]:
    """The names of a command's rows, without those of targets, which are hidden."""
    command: Any = app
    for word in verb.split("."):
        command = command.get_command(click.Context(command), word)
    return [param.name for param in command.params if not getattr(param, "hidden", False)]


def parameters(verb: str) -> dict[str, inspect.Parameter]:
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    found = inspect.signature(FUNCTIONS[verb]).parameters.items()
    return {name: one for name, one in found if one.kind not in kinds and name != "progress"}


@pytest.mark.parametrize("verb", FUNCTIONS)
def test_every_parameter_of_a_verb_has_a_flag_and_the_other_way_round(verb: str) -> None:
    assert {*rows(verb)} - PRINTED - OWN.get(verb, set()) == {*parameters(verb)} - PYTHON.get(verb, set())


@pytest.mark.parametrize("verb", FUNCTIONS)
def test_a_flag_has_the_default_and_the_type_of_the_parameter(verb: str) -> None:
    known = parameters(verb)
    for name in [name for name in rows(verb) if name in known]:
        flag, default, annotation = flag_of(verb, name), known[name].default, str(known[name].annotation)
        if (verb, name) == ("run", "text"):
            assert flag.default is None, "a chain and a picture need none"
        elif default is inspect.Parameter.empty:
            assert flag.default is REQUIRED, name
        elif flag.read is None:
            assert (flag.default, type(flag.default)) == (default, type(default)), name
        else:
            assert (None if flag.default is None else flag.read(flag.default)) == default, name
        if flag.kind in (int, float, bool) and flag.read is None:
            assert "Any" in annotation or flag.kind.__name__ in annotation, (name, annotation)


def test_every_row_belongs_to_a_verb() -> None:
    used = {f"{verb}.{name}" if f"{verb}.{name}" in FLAGS else name for verb in FUNCTIONS for name in rows(verb)}
    assert used == {*FLAGS}


def test_a_batch_asks_with_the_rows_of_its_flags() -> None:
    assert {*inspect.signature(BatchOptions).parameters} == {*rows("batch")} - PRINTED - {"manifest"}


@pytest.mark.parametrize(
    ("text", "typed"),
    [
        ("calib= (--calib) and data= (--data) both say", "--calib and --data both say"),
        ("give tokenizer=; use kv='fp8' or 'int8'", "give --tokenizer; use --kv fp8 or 'int8'"),
        ("use quant='none' (--quant none) to dequantize", "use --quant none to dequantize"),
        ("leave the cache out: cache=False", "leave the cache out: --no-cache"),
        ("config=/a/b.json (--config): cannot be read", "--config /a/b.json: cannot be read"),
        ("give config={'window': None}", """give --config '{"window": null}'"""),
        ("""config={'a': [1]} (--config '{"a": [1]}')""", """--config '{"a": [1]}'"""),
        ("s3://bucket/seed=1/model: no such directory; /data/quant=fp8/m; --calib=x",) * 2,
        ("dtype=torch.bfloat16, bridge.convert(model, quant='fp8')",) * 2,
    ],
)
def test_a_message_names_arguments_as_they_are_typed(text: str, typed: str) -> None:
    assert in_flags(text) == typed


def test_a_misspelled_argument_finds_the_right_one() -> None:
    """Options of targets were offered alone, and none of them is near."""
    wrong: dict[str, Any] = {"smaples": 4}
    for verb in (bridge.plan, bridge.convert):
        with pytest.raises(UsageError, match=r"'smaples' is neither an argument .* did you mean 'samples'\?"):
            verb("examples/models/tiny-llama", "hf", "fp8", **wrong)
    with pytest.raises(UsageError, match="nearest: shard_size"):
        bridge.plan("examples/models/tiny-llama", "hf", "fp8", **{"shard_sze": "5GB"})  # type: ignore[misc]
    for other in (bridge.calibrate, bridge.inspect):
        with pytest.raises(TypeError, match=r"\(\) has no argument 'smaples'; known: .*; nearest: samples"):
            other("examples/models/tiny-llama", "fp8", **wrong)
