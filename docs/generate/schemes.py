"""One page per scheme and family, from `mappings/schemes/*.toml`: numerics, gates, calibration, targets."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path

import bridge
from bridge.api.advice import divergence
from bridge.cli.show import describe
from bridge.core.dtypes import DTYPES, SEARCHED
from bridge.core.errors import PlanError
from bridge.core.mappings import find_table_file
from bridge.planning.plan import Plan, Step
from bridge.quant.describe import contract_words, needs, nominal_bits
from bridge.quant.schemes.catalog import RULE, scheme_names
from bridge.quant.schemes.load import load_scheme
from bridge.targets import load_target, target_names
from docs.generate.matrix import address, cell, table
from docs.generate.quality import kl_words
from docs.generate.targets import MODEL

ROOT = Path(__file__).parent.parent.parent


FAMILIES = (
    "INT8", "INT2 to INT6", "FP8", "NVFP4", "MX", "llama.cpp", "MLX",
)  # fmt: skip
OF_LLAMA = re.compile(r"i?q\d")


def pages() -> dict[str, str]:
    """File name -> page, one per scheme and one per family."""
    named = tests()
    made = {address(name): page(name, named[name]) for name in scheme_names()}
    return made | {path: family_page(title) for title, path in families()}


def families() -> list[tuple[str, str]]:
    """The title and the address of each family's page."""
    return [(title, f"schemes/of-{re.sub(r'[^a-z0-9]+', '-', title.lower())}.md") for title in FAMILIES]


def family(name: str) -> str:
    """The family of a scheme, by the codes of its weights."""
    if OF_LLAMA.match(name):
        return "llama.cpp"
    words = contract_words(load_scheme(name).formats[0])
    if words.startswith("affine"):
        return "MLX"
    if "e8m0" in words:
        return "MX"
    kind = words.split()[0]
    return "NVFP4" if kind == "fp4" else "INT2 to INT6" if re.match(r"int[2-6]", kind) else kind.upper()


def family_page(title: str) -> str:
    """The schemes of a family, those with the least KL first."""
    names = sorted(
        (name for name in scheme_names() if family(name) == title),
        key=lambda name: (divergence(name) is None, divergence(name), name),
    )
    rows = [
        [f"[`{name}`]({address(name).removeprefix('schemes/')})", f"{nominal_bits(load_scheme(name)):.2f}",
         kl_words(name), needs(load_scheme(name)).partition(":")[0], load_scheme(name).summary]
        for name in names
    ]  # fmt: skip
    text = "KL is in nats a token on SmolLM2-135M, dithered: [Quality](../quality.md)."
    return f"# {title}\n\n{text}\n\n{table(['scheme', 'bits', 'KL', 'calibration', 'what it is'], rows)}"


def page(name: str, named: list[tuple[str, str]]) -> str:
    """Everything known about a scheme without running it, and the tests that run it."""
    layout, _, rule = name.partition(RULE)
    scheme, path = load_scheme(name), find_table_file("rules" if rule else "schemes", layout)
    assert path
    targets = {target: cell(scheme, load_target(target)) for target in target_names()}
    taken = [target for target, said in targets.items() if said != "no"]
    shown = "hf" if "hf" in taken else taken[0]
    flag = "" if targets[taken[0]] == "yes" else f" {targets[taken[0]].strip('`')}"
    (columns, *_) = describe(name)[1]
    facts = [[label, text] for label, text in columns.rows if label not in ("what it is", "KV cache")]
    return "\n\n".join(
        [
            f"# `{name}`",
            f"{scheme.summary}.",
            f"```sh\nqbridge convert MODEL --target {taken[0]} --quant {name}{flag}\n```",
            "## Numerics",
            table(["", ""], facts),
            _calibration(name),
            "## What is written for a matrix",
            _written(name, shown, {"format": "compressed-tensors"} if "compressed-tensors" in targets[shown] else {}),
            "## Which targets take it",
            table(["target", "taken"], [[f"[`{t}`](../targets/{t}.md)", said] for t, said in targets.items()]),
            "## How it is tested",
            "These test files name the scheme. `qbridge convert` also checks each model against the gates above.",
            table(["test", "what it checks"], [[f"`{test}`", what] for test, what in named]),
            "## The file",
            f"```toml\n{path.read_text(encoding='utf-8').strip()}\n```",
        ]
    )


def _calibration(name: str) -> str:
    scheme = load_scheme(name)
    if not scheme.needs_calibration:
        return "It needs no calibration. No framework is loaded, and rows stream from shard to shard."
    if not scheme.needs_modelopt:
        also = "; or it takes what llama.cpp's llama-imatrix wrote" if scheme.weight[0].dtype in SEARCHED else ""
        return f"The plain model calibrates it, without ModelOpt{also}."
    said = "ModelOpt calibrates it (`pip install '.[calibrate]'`), once for all targets."
    if not scheme.simulation_needs_cuda:
        return said
    return f"{said} Its outputs are compared with ModelOpt's own only with CUDA: {scheme.simulation_needs_cuda}."


def _written(name: str, target: str, options: dict[str, str]) -> str:
    scheme = load_scheme(name)
    try:
        plan = bridge.plan(MODEL, target, replace(scheme, only=()), **options)  # the tiny Llama has no experts
    except PlanError:  # its rows are too narrow
        kind = scheme.weight[0]
        size = DTYPES[kind.dtype]
        return f"One tensor of target `{target}` in blocks of {size.block} values of a row, {size.size} bytes each."
    head = f"For target `{target}` and a weight `W` of the tiny Llama, as `qbridge plan` prints it:"
    return f"{head}\n\n{_expressions(plan)}"


def _expressions(plan: Plan) -> str:
    step: Step = plan.quantized[0]
    rows = [
        [f"`{o.spec.name.rpartition('q_proj.')[2]}`", "x".join(map(str, o.spec.shape)) or "scalar", o.spec.dtype,
         f"`{o.expression.replace(step.source.removesuffix('.weight'), 'W').replace('W.weight', 'W')}`"]
        for o in step.outputs
    ]  # fmt: skip
    return table(["tensor", "shape", "dtype", "made from"], rows)


def tests() -> dict[str, list[tuple[str, str]]]:
    """Scheme -> (file, first line) of every test of codes and targets that names it in a table."""
    found: dict[str, list[tuple[str, str]]] = {name: [] for name in scheme_names()}
    for path in sorted(path for kind in ("quant", "targets") for path in (ROOT / "tests" / kind).rglob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        tables = [node.value for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign) and node.value]
        words = {n.value for value in tables for n in ast.walk(value) if isinstance(n, ast.Constant)}
        first = " ".join((ast.get_docstring(tree) or "").split("\n\n")[0].split())
        for name in found.keys() & words:
            found[name].append((str(path.relative_to(ROOT)), first))
    return found
