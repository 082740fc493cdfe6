"""ONNX files for `lint`: damaged bytes and changed messages, against onnx.checker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from bridge.targets.onnx.lint import Finding, lint
from tests.fuzz.case import Case, Target
from tests.fuzz.mutate import INTEGERS, WORDS, damaged, pick
from tests.targets.onnx.lint.lint_models import fp8

FILE = "model.onnx"


def make(root: Path) -> None:
    path = Path(fp8().write(root))
    if path != root / FILE:
        path.rename(root / FILE)


def _messages(message: Any) -> list[Any]:
    """A message and all within it."""
    found = [message]
    for field, value in message.ListFields():
        if field.type == field.TYPE_MESSAGE:
            for inner in value if field.is_repeated else [value]:
                found += _messages(inner)
    return found


@st.composite
def _models(draw: st.DrawFn, data: bytes) -> bytes:
    """Some fields of some messages set to hostile numbers and words, dropped, or given twice."""
    model = onnx.load_from_string(data)
    for _ in range(draw(st.integers(1, 3))):
        every = _messages(model)
        message = every[draw(st.integers(0, len(every) - 1))]
        fields = [field for field, _ in message.ListFields()]
        if not fields:
            continue
        field = fields[draw(st.integers(0, len(fields) - 1))]
        if draw(st.integers(0, 4)) == 0:
            message.ClearField(field.name)
        elif field.is_repeated:
            held = getattr(message, field.name)
            held.extend(list(held)[: draw(st.sampled_from((1, 1, 50)))])
        else:
            _set(draw, message, field)
    return bytes(model.SerializeToString())


def _set(draw: st.DrawFn, message: Any, field: Any) -> None:
    value: Any = pick(draw, INTEGERS)
    if field.type == field.TYPE_STRING:
        value = pick(draw, WORDS).encode("utf-8", "replace").decode()
    elif field.type == field.TYPE_BYTES:
        value = draw(st.binary(max_size=20))
    try:
        setattr(message, field.name, value)
    except (TypeError, ValueError, AttributeError):  # not a value of that field
        message.ClearField(field.name)


def cases(root: Path) -> SearchStrategy[Case]:
    data = (root / FILE).read_bytes()
    return st.one_of(_models(data), _models(data), damaged(data)).map(lambda content: {FILE: content})


def read(root: Path) -> list[Finding]:
    return lint(root / FILE)


def agree(root: Path, found: list[Finding]) -> None:
    assert all(str(finding) for finding in found)
    if not any(finding.severity == "error" for finding in found):
        onnx.checker.check_model(str(root / FILE))


TARGET = Target("graphs", make, cases, read, agree, FILE)
