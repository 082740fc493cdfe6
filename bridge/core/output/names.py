"""Names of the files that a conversion adds to an output."""

from __future__ import annotations

MANIFEST = "bridge.json"  # in every model that bridge wrote: it tells an output from other directories
JOURNAL = "journal.jsonl"
GENERATION = "generation_config.json"
CARD = "README.md"  # the source's, until a report replaces it

# Files beside what the target writes; see bridge.verification.verify and bridge.core.output.directory.
# Runtimes load every *.safetensors beside config.json if there is no index: ours lies one level down.
CALIBRATION = "bridge/calibration.safetensors"
CALIBRATING = "bridge/calibration.partial"  # the finished blocks of a calibration, while it runs
RECIPE = "bridge/recipe.toml"  # the recipe that quant="auto:..." chose
PRUNING = "bridge/pruning.safetensors"  # what a pruned model kept
REPAIR = "bridge/repair.json"  # in every directory that `repair` wrote: what was mended
# Engines of TensorRT, of which each build gives other bytes, and their record, which has their digests.
ENGINES = ("*.engine", "engine.json")
WRITES = (MANIFEST, CALIBRATION, RECIPE, "report.json", "report.html", JOURNAL)

DISTCP = ".distcp"  # the suffix of the files of a distributed checkpoint
GGUF = ".gguf"  # the suffix of llama.cpp's files
STEM = "diffusion_pytorch_model"  # of the weight files of a model of diffusers
