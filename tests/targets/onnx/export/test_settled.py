"""What calls change in models so that they can be traced leaves their outputs as they are."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

from bridge.targets.onnx.export.calls.images import _forget_biases
from bridge.targets.onnx.export.calls.sound import _fill_up, sound_masks
from bridge.targets.onnx.export.family import replace_methods

MOONSHINE = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "encoder_num_hidden_layers": 1,
    "decoder_num_hidden_layers": 1, "encoder_num_attention_heads": 2, "decoder_num_attention_heads": 2,
}  # fmt: skip
S2T = {
    "vocab_size": 32, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "input_feat_per_channel": 6,
    "conv_channels": 8, "max_source_positions": 80,
}  # fmt: skip


@pytest.mark.parametrize("frames", [4, 5, 6, 7, 12])
def test_sew_fills_up_the_frames_that_its_pool_drops(frames: int) -> None:
    from transformers.models.sew.modeling_sew import SEWEncoder

    config = transformers.SEWConfig(
        hidden_size=12, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, squeeze_factor=3,
        num_conv_pos_embeddings=6, num_conv_pos_embedding_groups=2,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    encoder, states = SEWEncoder(config).eval(), torch.randn(2, frames, 12)
    with torch.no_grad():
        want = encoder(states.clone()).last_hidden_state
        _fill_up(encoder)
        torch.testing.assert_close(encoder(states).last_hidden_state, want)
    assert want.shape[1] == frames


def test_levit_reads_its_biases_again_in_each_run() -> None:
    config = transformers.LevitConfig(
        image_size=32, hidden_sizes=[16, 16, 16], num_attention_heads=[2, 2, 2], depths=[1, 1, 1], key_dim=[8, 8, 8]
    )
    model, pixels = transformers.LevitModel(config).eval(), torch.randn(1, 3, 32, 32)
    _forget_biases(model)
    with torch.no_grad():
        first = model(pixels).last_hidden_state
        for name, parameter in model.named_parameters():
            if name.endswith("attention_biases"):
                parameter.normal_(std=3)
        second = model(pixels).last_hidden_state
        want = copy.deepcopy(model).train().eval()(pixels).last_hidden_state
    assert (first - second).norm() > 1e-2 * first.norm()
    torch.testing.assert_close(second, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


def test_zoedepth_parts_its_stages_by_their_number() -> None:
    from transformers.models.zoedepth.modeling_zoedepth import ZoeDepthReassembleStage

    config = transformers.ZoeDepthConfig(
        backbone_config=transformers.BeitConfig(out_features=["stage1", "stage2"]), backbone_hidden_size=8,
        neck_hidden_sizes=[4, 6], reassemble_factors=[2, 1],
    )  # fmt: skip
    torch.manual_seed(0)
    stage, states = ZoeDepthReassembleStage(config).eval(), [torch.randn(3, 17, 8) for _ in range(2)]
    with torch.no_grad():
        want = stage(states, 4, 4)
        replace_methods(torch.nn.Sequential(stage))
        got = stage(states, 4, 4)
    assert len(got) == 2
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(("kind", "fields"), [("Moonshine", MOONSHINE), ("Speech2Text", S2T)])
def test_the_mask_of_states_is_made_before_the_encoder_runs(kind: str, fields: dict[str, int]) -> None:
    config = getattr(transformers, f"{kind}Config")(**fields)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    extents = [2300] if kind == "Moonshine" else [53, 6]
    sound, tokens = torch.randn(3, *extents), torch.tensor([[3, 5]] * 3)
    mask = (torch.arange(extents[0]) < torch.tensor([extents[0], extents[0] // 2, extents[0] * 3 // 4])[:, None]).long()
    given = {model.main_input_name: sound, "decoder_input_ids": tokens, "use_cache": False}
    found = sound_masks(model)
    assert found is not None
    with torch.no_grad():
        want = model(attention_mask=mask, **given).logits
        found.settle(model)
        states = found.states(model, mask)
        got = model(attention_mask=found.taken(states), **given)
    assert states.shape == got.encoder_last_hidden_state.shape[:2] and states.sum() < states.numel()
    torch.testing.assert_close(got.logits, want)
