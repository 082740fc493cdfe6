"""Run a model on held-out inputs: sampled outputs, and perplexity."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from bridge.calibration.data import Data
from bridge.core.errors import CalibrationError, VerifyError
from bridge.core.machine import returning_pages
from bridge.quant.calibration import HeldOut
from bridge.sources.configs.diffusion import FLOAT32, is_diffusion_model, nested
from bridge.sources.source import Source

if TYPE_CHECKING:
    from bridge.tracker.finite import NotFinite

VALUES = 1 << 19  # 2 MB of float32 for each model's outputs
COLUMNS = 4096  # of a vocabulary; at least 128 positions fit then
PIECE = 1 << 20  # logits that are copied in float64 at once
CHUNK = 1 << 22  # values that are compared at once, in float64: 32 MB per temporary array
Run = Callable[[Mapping[str, Any]], Any]


def answer(source: Source, data: Data) -> HeldOut:
    """Return the source model's outputs for the held-out inputs, without those of a fake-quantized model."""
    if not data.held_out:
        raise CalibrationError(data.missing or "no inputs were held out")
    return answer_of(source.load_model(), data)


@returning_pages()
def answer_of(model: Any, data: Data) -> HeldOut:
    """The same of a model that is loaded; `data` has held-out inputs."""
    run = runner(model)

    def step(batch: Mapping[str, Any]) -> Any:
        try:
            return run(batch)
        except Exception as error:
            raise CalibrationError(f"{refused(model, batch, error)}; give batches with the inputs it needs") from error

    return held_out_of(data, Answers(data.held_out, model).take_all(step), None)


@returning_pages()
def answer_again(source: Source, held: HeldOut) -> HeldOut:
    """Run the same inputs with `source` again; ModelOpt's outputs stay those of the calibration."""
    import torch

    batches = [{name: torch.from_numpy(array) for name, array in batch.items()} for batch in held.inputs]
    model = source.load_model()
    answers = Answers(batches, model, (held.rows, held.columns)).take_all(runner(model))
    return replace(held, source=answers.values, source_perplexity=answers.perplexity)


def _takes_cache(model: Any) -> bool:
    """Whether `use_cache` is an argument, of the model or of the base that it hands unknown ones to (GraniteMoe)."""
    takes = inspect.signature(model.forward).parameters
    base: Any = getattr(model, getattr(model, "base_model_prefix", None) or "", None)
    if "use_cache" in takes or base is None:
        return "use_cache" in takes
    hands = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in takes.values())
    return hands and "use_cache" in inspect.signature(base.forward).parameters


def runner(model: Any, device: Any = None) -> Run:
    """Return a function from a batch to output 0 of `model` on the CPU, in evaluation mode without gradients.

    `device`: where its inputs go, None for that of its first parameter. The output keeps the dtype of the model: a
    float32 copy of [8, 128, 128256] is 525 MB.

    Float inputs (pixels, sounds) are cast to the model's dtype, as torch requires. The training flags of all modules
    are restored, also after an exception. A masked autoencoder hides the same patches in every run.
    """
    import torch

    cache = {"use_cache": False} if _takes_cache(model) else {}
    device = device or next((p.device for p in model.parameters()), torch.device("cpu"))
    dtype = getattr(model, "dtype", torch.float32)

    diffuses = is_diffusion_model(model)
    hides = "noise" in inspect.signature(model.forward).parameters and hasattr(model.config, "mask_ratio")

    def given(name: str, tensor: Any) -> Any:
        cast = tensor.is_floating_point() and not (diffuses and name in FLOAT32)
        return tensor.to(device, dtype) if cast else tensor.to(device)

    def run(batch: Mapping[str, Any]) -> Any:
        training = [module for module in model.modules() if module.training]
        try:
            for module in training:
                module.training = False
            with torch.no_grad():
                inputs = {name: given(name, tensor) for name, tensor in batch.items()}
                if hides and "noise" not in inputs:
                    inputs["noise"] = _noise(inputs["pixel_values"], model.config.patch_size)
                output = model(**(nested(inputs) if diffuses else inputs), **cache)
        finally:
            for module in training:
                module.training = True
        return _first(output).detach().cpu()

    return run


def _noise(pixels: Any, patch: int) -> Any:
    """What ViT-MAE sorts to choose the patches that it hides; it would draw others in each run."""
    import torch

    shape = pixels.shape[0], pixels.shape[-2] // patch * (pixels.shape[-1] // patch)
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(pixels.device)


def _first(output: Any) -> Any:
    """Output 0, behind the loss that models of masked images give with what is masked."""
    if isinstance(output, Mapping):
        return next(value for name, value in output.items() if name != "loss")
    return output if hasattr(output, "detach") else output[0]


def reads_held_out(model: Any, data: Data) -> bool:
    """Whether there are held-out inputs that a model reads.

    Behind a forward_loop they are the embedded text, which not every model with a vocabulary takes alone.
    """
    if not data.held_out or data.forward_loop is None:
        return bool(data.held_out)
    try:
        runner(model)(data.held_out[0])
    except Exception:
        return False
    return True


def blaming(run: Run, plain: Any) -> Run:
    """Return `run` with a CalibrationError if the inputs make `plain` fail, too, or give NaN."""

    def step(batch: Mapping[str, Any]) -> Any:
        try:
            return run(batch)
        except Exception as error:
            if why := why_failed(plain, batch):
                raise CalibrationError(why) from error
            raise

    return step


def proving(model: Any) -> Run:
    """Return what `runner` does, with a VerifyError that names the module which cannot run, or makes a NaN."""
    run = runner(model)

    def step(batch: Mapping[str, Any]) -> Any:
        try:
            output = run(batch)
        except Exception as error:
            raise VerifyError(refused(model, batch, error)) from error
        if bool(output.isnan().any()) and (why := why_failed(model, batch)):
            raise VerifyError(why)
        return output

    return step


def why_failed(plain: Any, batch: Mapping[str, Any]) -> str:
    """Why a run fails, by what the unquantized model does with the same inputs; "" if it runs on them."""
    from bridge.tracker.finite import NanFinder

    with NanFinder(plain) as finder:
        try:
            output = runner(plain)(batch)
        except Exception as error:
            return f"{refused(plain, batch, error)}; give batches with the inputs it needs, or a forward_loop(model)"
    # a sound model may hold infinities, in a mask
    return why_nan(finder.first) if finder.first and not bool(output.isfinite().all()) else ""


def why_nan(first: NotFinite) -> str:
    """Say which module made a NaN, or an infinity, of the data, and which of its tensors has one."""
    if not first.module:
        return f"{first}; check the data"
    broken = first.parameter
    why = f"its {broken} holds NaN or infinity" if broken else "check the data, or calibrate in bfloat16 or float32"
    return f"{first.module} makes {first.value} of the data, which hold none before it: {why}"


def refused(model: Any, batch: Mapping[str, Any], error: Exception, module: str = "") -> str:
    """Say what a model was given, and which module raised what; `module`: "" looks for it in the model."""
    from bridge.tracker.raised import raised_in

    lines = str(error).strip().splitlines() or ["no reason given"]
    takes = [name for name in inspect.signature(model.forward).parameters if name not in ("labels", "kwargs")]
    module = module or raised_in(error, model.named_modules())
    where = f" in {module}" if module else ""
    return (
        f"{type(model).__name__} cannot be run on {', '.join(batch)} ({type(error).__name__}{where}: "
        f"{lines[0][:300]}); its forward takes {', '.join(takes[:6])}"
    )


def sample(output: Any, batch: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Choose the rows (of the flattened leading axes) and columns of an output to keep; padding is left out."""
    width = int(output.shape[-1])
    columns = np.arange(width) if width <= COLUMNS else np.linspace(0, width - 1, COLUMNS)
    rows = unpadded(output, batch).numpy()
    return rows[: max(64, VALUES // columns.size)], columns.astype(np.int64)


def unpadded(output: Any, batch: Mapping[str, Any]) -> Any:
    """Return the rows of the flattened leading axes of an output that are not padding, as a tensor of int64."""
    import torch

    count = output.numel() // output.shape[-1]
    mask = batch.get("attention_mask")
    if mask is not None and mask.ndim == 2 and mask.numel() == count:
        return mask.reshape(-1).nonzero().reshape(-1)
    return torch.arange(count)


def kl(plain: Any, other: Any, rows: Any) -> float:
    """Sum of KL(plain || other) over `rows` of two tensors of logits, in float64; infinite if `other` has NaN."""
    import torch

    width = plain.shape[-1]
    plain, other, total = plain.reshape(-1, width), other.reshape(-1, width), 0.0
    for part in torch.split(rows, max(1, CHUNK // width)):
        total += float(divergence(*(torch.log_softmax(logits[part].double(), -1) for logits in (plain, other))).sum())
    return math.inf if math.isnan(total) else max(total, 0.0)


def divergence(plain: Any, other: Any) -> Any:
    """KL(plain || other) at each position of two tensors of log probabilities."""
    terms = plain.exp() * (plain - other)
    return terms.masked_fill(plain.isneginf(), 0).sum(-1)  # a token of probability 0 adds nothing


def pick(output: Any, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Return the kept part of an output, float32."""
    import torch

    flat = output.reshape(-1, output.shape[-1])
    picked = flat[torch.from_numpy(rows)[:, None], torch.from_numpy(columns)]
    return np.ascontiguousarray(picked.float().numpy())


def predicts_next_token(model: Any) -> bool:
    """Whether the outputs of a model are logits of the next token."""
    kind = type(model).__name__
    return "ForCausalLM" in kind or kind.endswith("LMHeadModel")


class Answers:
    """What a calibration keeps of the outputs for held-out inputs: a sample of the first, and the loss of all.

    `sampled`: rows and columns of another model's answers; None chooses them. `batches`: those that must be run.
    `losses`: sum and number by batch.
    """

    def __init__(
        self, batches: Sequence[Mapping[str, Any]], model: Any, sampled: tuple[np.ndarray, np.ndarray] | None = None
    ) -> None:
        self._predicts = predicts_next_token(model)
        self.batches = batches if self._predicts else batches[:1]
        self.sampled = sampled
        self.values = np.empty((0, 0), np.float32)
        self.losses: dict[int, tuple[float, int]] = {}

    def take(self, at: int, output: Any) -> None:
        """Keep the part of the output for batch `at`."""
        if at == 0:
            self.sampled = self.sampled or sample(output, self.batches[0])
            self.values = pick(output, *self.sampled)
        if self._predicts:
            self.losses[at] = next_token_loss(output, as_arrays(self.batches[at : at + 1])[0])

    def take_all(self, run: Run, done: Callable[[], object] = lambda: None) -> Answers:
        """Run all batches and keep their outputs; `done` is called after each."""
        for at, batch in enumerate(self.batches):
            self.take(at, run(batch))
            done()
        return self

    @property
    def perplexity(self) -> float | None:
        """Exp of the mean next-token loss over all batches."""
        return mean_perplexity(loss for _, loss in sorted(self.losses.items())) if self._predicts else None


def held_out_of(data: Data, source: Answers, quantized: Answers | None) -> HeldOut:
    """Join both models' answers; None: ModelOpt's kernels do not run here."""
    assert source.sampled
    rows, columns = source.sampled
    theirs = quantized.values if quantized else np.empty((rows.size, 0), np.float32)
    loss = quantized.perplexity if quantized else None
    windows = data.windows if source.perplexity is not None else ()
    return HeldOut(as_arrays(data.held_out), rows, columns, source.values, theirs, source.perplexity, loss, windows)


def next_token_loss(logits: Any, batch: Mapping[str, np.ndarray]) -> tuple[float, int]:
    """Return the summed negative log-likelihood of the next tokens, and their number, without padding.

    `logits`: an array, or a tensor. Each position is summed by itself, so that pieces give the same bits as the whole.
    """
    ids = batch["input_ids"]
    mask = batch.get("attention_mask")
    mask = np.ones(ids.shape, bool) if mask is None or mask.ndim > 2 else mask.astype(bool)
    keep = mask[:, 1:] & mask[:, :-1]
    losses = np.empty(keep.shape, np.float64)
    step = max(1, PIECE // logits.shape[-1])
    for row, targets in enumerate(ids[:, 1:]):
        for begin in range(0, targets.size, step):
            target = targets[begin : begin + step]
            losses[row, begin : begin + step] = _losses(logits[row, begin : begin + target.size], target)
    return float((losses * keep).sum()), int(keep.sum())


def _losses(logits: Any, targets: np.ndarray) -> np.ndarray:
    """Return the negative log-likelihood of each target."""
    values = logits if isinstance(logits, np.ndarray) else logits.float().numpy()
    shifted = values.astype(np.float64)
    shifted -= shifted.max(-1, keepdims=True)
    chosen = np.take_along_axis(shifted, targets[:, None], -1)[..., 0]
    losses: np.ndarray = np.log(np.exp(shifted, out=shifted).sum(-1)) - chosen
    return losses


def mean_perplexity(losses: Iterable[tuple[float, int]]) -> float | None:
    """Return exp of the mean of (sum, count) pairs, at most e^700; None without predictions."""
    pairs = list(losses)
    count = sum(n for _, n in pairs)
    mean = sum(loss for loss, _ in pairs) / count if count else 0.0
    return math.exp(min(mean, 700.0)) if count and math.isfinite(mean) else None


def as_arrays(batches: Sequence[Mapping[str, Any]]) -> tuple[dict[str, np.ndarray], ...]:
    """Return batches as NumPy arrays: integers as int64, the rest as float32."""

    def array(tensor: Any) -> np.ndarray:  # NumPy has no bfloat16
        values: np.ndarray = tensor.float().numpy() if tensor.is_floating_point() else tensor.numpy().astype(np.int64)
        return values

    return tuple({name: array(tensor) for name, tensor in batch.items()} for batch in batches)
