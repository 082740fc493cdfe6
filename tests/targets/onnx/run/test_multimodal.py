"""The graphs of models that see against transformers: prompts with images, steps, left padding; the verb run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers

import bridge
from bridge.core.errors import UsageError, VerifyError
from bridge.targets.onnx.files import GENAI
from bridge.targets.onnx.run.multimodal import MultiModal, mrope_positions
from bridge.verification.outputs import relative_l2
from tests import once
from tests.models.seeing_family import LLAMA, picture, save_llava
from tests.sweep import seeing
from tests.sweep.build import FAMILIES, build

pytest.importorskip("PIL")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("graphs_once")]
TOLERANCE = 2e-6  # float32 sums in another order
TEXT = "The value <image> of the function"


def llava() -> Path:
    return once.directory("tiny-llava", save_llava)


def converted(scheme: str | None, kv: str | None = None) -> Path:
    """An output, made once a run; it must pass its own verification."""

    def make(directory: Path) -> None:
        data = [batch(seed) for seed in (1, 2)]
        report = bridge.convert(llava(), "trt", scheme, directory / "out", data=data, kv=kv, progress=False)
        assert report.passed, report
        assert not [note for note in report.notes if "decoder.onnx" in note], "its layers are stamped"

    return once.directory(f"llava-{scheme}-{kv}", make) / "out"


def model() -> Any:
    return transformers.LlavaForConditionalGeneration.from_pretrained(llava(), dtype=torch.float32)


def batch(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    config = transformers.AutoConfig.from_pretrained(llava())
    ids = torch.randint(5, 300, (2, 24), generator=generator)
    ids[:, 3:12] = config.image_token_id
    return {"input_ids": ids, "pixel_values": torch.randn(2, 3, 24, 24, generator=generator)}


def test_prompts_steps_padding_and_texts_alone_equal_transformers() -> None:
    far = seeing.distances(model(), converted(None))
    assert far.keys() == {"logits", "steps", "padded", "text"}
    assert all(error < TOLERANCE for error in far.values()), far


def test_the_manifest_names_files_inputs_outputs_and_the_image_token() -> None:
    joined = json.loads((converted(None) / GENAI).read_text())["model"]
    assert joined["image_token_id"] == model().config.image_token_id
    for part in ("vision", "embedding", "decoder"):
        graph = onnx.load(converted(None) / joined[part]["filename"], load_external_data=False).graph
        known = {value.name for value in (*graph.input, *graph.output)}
        named = {*joined[part]["inputs"].values(), *joined[part]["outputs"].values()}
        assert {name.replace("%d", "0") for name in named} <= known
        assert {name for name in known if "." not in name} <= named


def test_only_the_decoder_is_quantized_and_the_outputs_stay_near() -> None:
    out = converted("fp8")
    read = {
        part: {
            name for node in onnx.load(out / f"{part}.onnx", load_external_data=False).graph.node for name in node.input
        }
        for part in ("vision", "embedding", "decoder")
    }
    scales = {part: {name for name in names if name.endswith("_scale")} for part, names in read.items()}
    assert not scales["vision"] | scales["embedding"]
    assert any(name.endswith("mlp.up_proj.weight_scale") for name in scales["decoder"])
    far = seeing.distances(model(), out)
    assert 1e-4 < far["logits"] < 0.2, far


def test_a_cache_in_codes_moves_the_outputs_little() -> None:
    out = converted("fp8", "fp8")
    graph = onnx.load(out / "decoder.onnx", load_external_data=False).graph
    made = {name: node.op_type for node in graph.node for name in node.output}
    present = [value.name for value in graph.output if value.name.startswith("present.")]
    assert {made[name] for name in present} == {"DequantizeLinear"}
    far = seeing.distances(model(), out)
    assert 1e-4 < far["logits"] < 0.2, far


def test_run_answers_a_text_with_an_image_as_transformers_does(tmp_path: Path) -> None:
    image = picture(tmp_path / "image.png")
    processor = transformers.AutoProcessor.from_pretrained(llava())
    given = processor(text=TEXT, images=[image], return_tensors="pt")
    wanted = model().generate(**given, max_new_tokens=8, do_sample=False, eos_token_id=None)
    answer = bridge.run(converted(None), TEXT, image=tmp_path / "image.png", tokens=8)
    assert answer.prompt_tokens == given["input_ids"].shape[1] > 12
    assert list(answer.ids) == wanted[0, answer.prompt_tokens :].tolist()
    other = bridge.run(converted(None), TEXT, image=[_other(tmp_path)], tokens=8)
    assert other.ids != answer.ids, "the image makes a difference"
    chat = bridge.run(converted(None), "The value", image=tmp_path / "image.png", chat=True, tokens=2)
    assert chat.prompt_tokens > 9


def test_a_checkpoint_for_transformers_looks_at_images_too(tmp_path: Path) -> None:
    bridge.convert(llava(), "hf", "none", tmp_path / "out", verify=False, progress=False)
    picture(tmp_path / "image.png")
    for file in (tmp_path / "image.png", _other(tmp_path)):
        answers = [bridge.run(out, TEXT, image=file, tokens=8) for out in (tmp_path / "out", converted(None))]
        assert answers[0].ids == answers[1].ids


def _other(folder: Path) -> Path:
    picture(folder / "other.png", seed=4)
    return folder / "other.png"


def test_run_says_what_is_wrong_with_an_image(tmp_path: Path) -> None:
    picture(tmp_path / "image.png")
    (tmp_path / "no.png").write_text("no image")
    with pytest.raises(UsageError, match=r"no\.png: not a readable image"):
        bridge.run(converted(None), TEXT, image=tmp_path / "no.png")
    with pytest.raises(UsageError, match=r"total 0 <image> tokens and 1 images(.|\n)*write <image> into the text"):
        bridge.run(converted(None), "The value", image=tmp_path / "image.png")
    bare = shutil.copytree(converted(None), tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    with pytest.raises(UsageError, match=r"the processor has no chat template; leave out chat=True \(--chat\)"):
        bridge.run(bare, "The value", image=tmp_path / "image.png", chat=True)
    bridge.convert(LLAMA, "trt", None, tmp_path / "llama", verify=False, progress=False)
    with pytest.raises(UsageError, match="LlamaForCausalLM reads no images"):
        bridge.run(tmp_path / "llama", "The value", image=tmp_path / "image.png")


def test_image_tokens_without_images_are_refused() -> None:
    ids = batch(1)["input_ids"].numpy()
    with pytest.raises(VerifyError, match=r"18 image tokens \(id \d+\), and what vision.onnx reads makes 0 rows"):
        MultiModal(converted(None)).run({"input_ids": ids})
    pixels = np.zeros((2, 3, 32, 32), np.float32)
    with pytest.raises(VerifyError, match=r"pixel_values is \(2, 3, 32, 32\).*vision.onnx takes"):
        MultiModal(converted(None)).run({"input_ids": ids, "pixel_values": pixels})


def spoken(out: Path, inputs: dict[str, np.ndarray], steps: int) -> np.ndarray:
    """onnxruntime-genai's logits before each of `steps` tokens."""
    og = pytest.importorskip("onnxruntime_genai")
    speaker = og.Model(str(out))
    params = og.GeneratorParams(speaker)
    params.set_search_options(max_length=90, do_sample=False)
    generator, named = og.Generator(speaker, params), og.NamedTensors()
    for name, array in inputs.items():
        named[name] = array
    generator.set_inputs(named)
    logits = []
    for _ in range(steps):
        generator.generate_next_token()
        logits.append(generator.get_output("logits")[0, -1].copy())
    return np.array(logits)


def assert_spoken(out: Path, model: Any, ids: np.ndarray, looked: dict[str, np.ndarray]) -> None:
    """A prompt with an image, and a text alone; 1e-4: genai's session has all graph optimizations."""
    token, graphs = model.config.image_token_id, MultiModal(out)
    text = np.where(ids < 300, ids, 7)
    for tokens, given in ((ids, looked), (text, {})):
        counted = {"num_image_tokens": np.array([int((ids == token).sum())])} if given else {}
        got = spoken(out, {"input_ids": tokens.astype(np.int32), **given, **counted}, 6)
        inputs, past = {"input_ids": tokens, **given}, {}
        places = graphs.places(inputs)
        for at, logits in enumerate(got):
            mask = np.ones((1, tokens.shape[1] + at), np.int64)
            three = {} if places is None else {"position_ids": places}
            want, past = graphs.step({**inputs, "attention_mask": mask, **three}, past)
            np.testing.assert_allclose(logits, want[0], atol=1e-4)
            inputs = {"input_ids": want.argmax(-1)[:, None]}
            places = None if places is None else np.full((3, 1, 1), places.max() + 1)


def test_genai_joins_the_graphs_of_a_model_type_that_it_knows(tmp_path: Path) -> None:
    """LLaVA's graphs under the name of one: onnxruntime-genai knows few types, and reads them all alike."""
    shutil.copytree(converted(None), tmp_path / "out")
    content = json.loads((tmp_path / "out" / GENAI).read_text())
    content["model"]["type"] = "gemma3"
    (tmp_path / "out" / GENAI).write_text(json.dumps(content))
    given = {name: tensor[:1].numpy() for name, tensor in batch(3).items()}
    assert_spoken(tmp_path / "out", model(), given.pop("input_ids"), given)


def test_sound_of_several_lengths_and_text_equal_transformers(tmp_path: Path) -> None:
    """Qwen2-Audio: the second sound is half as long, and its tower counts the rows."""
    listener = build("Qwen2AudioForConditionalGeneration", torch.float32)
    bridge.convert(listener, "trt", None, tmp_path / "out", verify=False, progress=False)
    far = seeing.distances(listener, tmp_path / "out")
    assert all(error < TOLERANCE for error in far.values()), far
    given = seeing.seen(listener, torch.Generator().manual_seed(3))
    given["feature_attention_mask"][1, 32:] = 0
    ids = torch.full((2, 20), 7)
    ids[0, 2:18], ids[1, 2:10] = listener.config.audio_token_id, listener.config.audio_token_id
    with torch.no_grad():
        want = listener(input_ids=ids, **given).logits.numpy()
    got = MultiModal(tmp_path / "out").run({"input_ids": ids.numpy(), **{n: t.numpy() for n, t in given.items()}})
    assert relative_l2(got["logits"], want) < TOLERANCE
    joined = json.loads((tmp_path / "out" / GENAI).read_text())["model"]
    assert joined["speech"]["filename"] == "speech.onnx" and joined["audio_token_id"] == 324


def test_places_of_images_and_texts_are_those_of_qwen() -> None:
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

    with torch.device("meta"):
        qwen = Qwen2VLModel(transformers.Qwen2VLConfig(**FAMILIES["Qwen2VLForConditionalGeneration"]))
    token, grids = qwen.config.image_token_id, torch.tensor([[1, 4, 6], [1, 2, 4], [1, 8, 4]])
    ids = torch.full((2, 20), 7)
    ids[0, 2:8], ids[0, 9:11], ids[1, 6:14] = token, token, token
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    kinds = (ids == token).long()
    want, _ = qwen.get_rope_index(ids, kinds, image_grid_thw=grids, attention_mask=mask)
    got = mrope_positions(ids.numpy(), mask.numpy(), grids.numpy(), token, 2)
    np.testing.assert_array_equal(got[:, mask == 1], want.numpy()[:, mask == 1])


@pytest.mark.product
@pytest.mark.parametrize("family", ["Gemma3", "Mistral3", "Qwen2_5_VL"])
def test_genai_sees_with_the_families_that_it_knows(family: str, tmp_path: Path) -> None:
    seer = build(f"{family}ForConditionalGeneration", torch.float32)
    report = bridge.convert(seer, "trt", None, tmp_path / "out", verify=False, progress=False)
    assert not [note for note in report.notes if "onnxruntime-genai" in note]
    looked = seeing.seen(seer, torch.Generator().manual_seed(4))
    one = {n: t.numpy()[: len(t) // 2] for n, t in looked.items() if n != "image_sizes"}
    ids = np.random.default_rng(3).integers(5, 300, (1, 16))
    rows = len(MultiModal(tmp_path / "out").features(one)["image_features"])
    ids[:, 4 : 4 + rows] = seer.config.image_token_id
    ids[:, 3] = getattr(seer.config, "vision_start_token_id", 3)
    assert_spoken(tmp_path / "out", seer, ids, one)
