"""Run a pipeline on prompts, and keep its denoiser's inputs."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.core.errors import CalibrationError
from bridge.core.values import main_dtype
from bridge.sources.configs.diffusion import PLACES
from bridge.sources.live_models.diffusion import quiet

if TYPE_CHECKING:
    from bridge.sources.checkpoint import HfSource

STEPS = 20
PROMPTS = Path(__file__).with_name("default_prompts.txt").read_text(encoding="utf-8").splitlines()
Batch = dict[str, Any]


def recorded(source: HfSource, prompts: Sequence[str], steps: int = STEPS) -> list[list[Batch]]:
    """Return the inputs of the denoiser, a list of `steps` batches or more for each prompt.

    The noise of each prompt has its own seed. The unquantized pipeline runs, on CUDA if that is there; nothing is
    decoded.
    """
    import torch

    pipeline, model = _pipeline(source)
    accepted = inspect.signature(pipeline.__call__).parameters
    batches: list[Batch] = []
    hook = model.register_forward_pre_hook(_keep(model, batches), with_kwargs=True)
    result = []
    try:
        for seed, prompt in enumerate(prompts):
            del batches[:]
            given = _given(prompt, seed, accepted)
            more = {"num_inference_steps": steps, "generator": torch.Generator().manual_seed(seed)}
            if "output_type" in accepted and "prompt" in accepted:
                more["output_type"] = "latent"
            with torch.no_grad():
                pipeline(**given, **more)
            result.append(list(batches))
    except CalibrationError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or ["no reason given"]
        raise CalibrationError(
            f"{source.where}: {type(pipeline).__name__} does not run on a prompt alone ({type(error).__name__}: "
            f"{lines[0][:300]}); record the inputs of its {source.folder} yourself, and give them as data= [batches]"
        ) from error
    finally:
        hook.remove()
    return result


def _pipeline(source: HfSource) -> tuple[Any, Any]:
    """The pipeline with the model of `source` in it; code and pickles of the directory are never run."""
    import torch

    model = source.load_model()
    with quiet():
        import diffusers

        dtype = getattr(torch, main_dtype(source.specs.values()))
        try:
            pipeline = diffusers.DiffusionPipeline.from_pretrained(
                str(source.root), **{source.folder: model}, torch_dtype=dtype, use_safetensors=True,
                local_files_only=True,
            )  # fmt: skip
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise CalibrationError(
                f"{source.where}: diffusers cannot load the pipeline to run prompts: {lines[0][:300]}; give batches of "
                f"the inputs of its {source.folder} as data="
            ) from error
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to("cuda" if torch.cuda.is_available() else "cpu"), model


def _given(prompt: str, seed: int, accepted: Any) -> dict[str, Any]:
    if "prompt" in accepted:
        return {"prompt": prompt}
    if "class_labels" in accepted:  # DiT draws classes, not prompts
        return {"class_labels": [seed]}
    raise ValueError("it takes neither a prompt nor class labels")


def _keep(model: Any, batches: list[Batch]) -> Any:
    """A hook that keeps the tensors among the inputs of each call, by name."""
    names = list(inspect.signature(model.forward).parameters)

    def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = dict(zip(names, args, strict=False)) | kwargs
        flat = {name: value for name, value in given.items() if not isinstance(value, dict)}
        flat |= {
            f"{outer}.{name}": value
            for outer, inner in given.items()
            if isinstance(inner, dict)
            for name, value in inner.items()
        }
        tensors = {name: value.detach().cpu() for name, value in flat.items() if hasattr(value, "detach")}
        rows = max((len(value) for name, value in tensors.items() if value.ndim and name not in PLACES), default=1)
        # one step for all rows
        batches.append({name: value if value.ndim else value.expand(rows).clone() for name, value in tensors.items()})

    return hook
