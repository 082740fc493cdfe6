"""A task made of the evaluation text, so that nothing is downloaded: which of four ends does a sentence have?

Each item is a sentence of the articles and news that calibrate nothing. Its beginning is given; the wrong ends are
those of other sentences of the same document, of about its length. lm_eval (0.4.13) scores them as any multiple choice:
by the likelihood of each end, divided by its characters. A seed draws them, so every model gets the same items.

lm_eval is no development dependency: `pip install --no-deps --target DIR lm_eval==0.4.13` with accelerate, sacrebleu,
portalocker, tabulate, colorama, rouge_score, nltk, absl-py, sqlitedict, more_itertools, word2number, zstandard,
jsonlines, pytablewriter, evaluate and lxml, and DIR in PYTHONPATH.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.evaluation.text import Text, read_text

ITEMS, ENDS, SEED = 200, 4, 45
WORDS = (12, 26)  # of a sentence; short ones leave too little to choose by
TASK = """\
task: ends
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{begin}}}}"
doc_to_choice: "{{{{ends}}}}"
doc_to_target: right
metric_list: [{{metric: acc_norm, aggregation: mean, higher_is_better: true}}]
"""


def items(text: Text, count: int = ITEMS) -> list[dict[str, Any]]:
    """Items by the seed: `begin`, `ends`, and `right`, the index of the true end."""
    draw = random.Random(SEED)
    documents = [cut for document in (*text.articles, *text.news) if len(cut := _cut(document)) >= ENDS]
    made: list[dict[str, Any]] = []
    while len(made) < count:
        document = draw.choice(documents)
        begin, end = draw.choice(document)
        others = sorted({other for _, other in document} - {end}, key=lambda other: abs(len(other) - len(end)))
        if len(others) < ENDS - 1 or any(begin == item["begin"] for item in made):
            continue
        ends = [end, *others[: ENDS - 1]]
        draw.shuffle(ends)
        made.append({"begin": begin, "ends": [f" {one}" for one in ends], "right": ends.index(end)})
    return made


def _cut(document: str) -> list[tuple[str, str]]:
    """Sentences of a document, each cut after three fifths of its words."""
    found = []
    for sentence in re.split(r"(?<=[.!?])\s+", document):
        words = sentence.split()
        if WORDS[0] <= len(words) <= WORDS[1] and sentence[0].isupper() and sentence[-1] == ".":
            at = len(words) * 3 // 5
            found.append((" ".join(words[:at]), " ".join(words[at:])))
    return list(dict.fromkeys(found))


def write_task(made: Sequence[dict[str, Any]], folder: Path) -> None:
    """The items and the task's file, as lm_eval reads them."""
    path = folder / "ends.jsonl"
    path.write_text("".join(json.dumps(item) + "\n" for item in made), encoding="utf-8")
    (folder / "ends.yaml").write_text(TASK.format(path=path), encoding="utf-8")


def accuracy(model: Any, bench: Any) -> float:
    """lm_eval's `acc_norm` of a model in memory."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    folder = bench.build / "task"
    folder.mkdir(exist_ok=True)
    write_task(items(read_text(bench.build)), folder)
    runner = HFLM(pretrained=model, tokenizer=bench.source.load_tokenizer(), batch_size=8, max_length=256)
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    results = simple_evaluate(runner, tasks=["ends"], task_manager=manager, bootstrap_iters=0)
    return float(results["results"]["ends"]["acc_norm,none"])
