"""The loss of the next tokens is that of torch, and the same bits in pieces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from bridge.calibration.reference_outputs import next_token_loss, pick, runner  # noqa: E402


def drawn(dtype: Any) -> tuple[Any, dict[str, np.ndarray]]:
    """Logits of a vocabulary of 1,003, ids, and a mask that pads two rows."""
    random = torch.Generator().manual_seed(5)
    logits = (torch.randn(3, 21, 1003, generator=random) * 9).to(dtype)
    ids = torch.randint(0, 1003, (3, 21), generator=random)
    mask = torch.ones_like(ids)
    mask[0, :4], mask[2, 17:] = 0, 0
    return logits, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_loss_in_pieces_has_the_bits_of_the_loss_at_once(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, batch = drawn(dtype)
    whole = next_token_loss(logits, batch)
    for piece in (1, 1003, 7 * 1003, 20 * 1003):
        monkeypatch.setattr("bridge.calibration.reference_outputs.PIECE", piece)
        assert next_token_loss(logits, batch) == whole
        assert next_token_loss(logits.float().numpy(), batch) == whole


def test_the_loss_is_the_cross_entropy_of_torch() -> None:
    logits, batch = drawn(torch.bfloat16)
    ids, mask = (torch.from_numpy(batch[name]) for name in ("input_ids", "attention_mask"))
    labels = ids.masked_fill(mask == 0, -100)[:, 1:].clone()
    labels[mask[:, :-1] == 0] = -100
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].double().transpose(1, 2), labels, reduction="sum")
    assert next_token_loss(logits, batch) == (pytest.approx(float(loss), rel=1e-12), int((labels >= 0).sum()))


@pytest.mark.parametrize("rows", [1, 3])
def test_a_mask_of_pairs_of_tokens_pads_nothing(rows: int) -> None:
    logits, batch = drawn(torch.float32)
    ids = batch["input_ids"]
    pairs = np.tril(np.ones((rows, 1, 21, 21), np.int64))
    plain = next_token_loss(logits, {"input_ids": ids})
    assert next_token_loss(logits, {"input_ids": ids, "attention_mask": pairs}) == plain


def test_what_is_kept_of_an_output_is_the_same_in_every_dtype() -> None:
    logits, _ = drawn(torch.bfloat16)
    rows, columns = np.array([0, 5, 62]), np.array([1, 1002, 7, 7])
    kept = pick(logits, rows, columns)
    assert kept.dtype == np.float32 and kept.flags.c_contiguous
    assert np.array_equal(kept, logits.float().numpy().reshape(-1, 1003)[rows[:, None], columns])


def test_a_masked_autoencoder_hides_the_same_patches_in_every_run() -> None:
    from transformers import ViTMAEConfig, ViTMAEForPreTraining

    size = {"image_size": 32, "patch_size": 8, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    decoder = {"decoder_hidden_size": 24, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2}
    model = ViTMAEForPreTraining(ViTMAEConfig(**size, **decoder, intermediate_size=40, decoder_intermediate_size=40))
    run, batch = runner(model), {"pixel_values": torch.randn(2, 3, 32, 32)}
    assert torch.equal(run(batch), run(batch))
