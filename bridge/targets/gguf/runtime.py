"""Run a GGUF file in llama.cpp, by the wheel `xllamacpp`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from bridge.core.errors import CannotRun
from bridge.core.formats.gguf import GgufFile
from bridge.core.version import install
from bridge.sources.source import Source
from bridge.targets.generation import Settings, from_thread
from bridge.targets.gguf.tokenizer import NO_TOKENS
from bridge.targets.target import LOG_PROBABILITIES

INSTALL = f"running a GGUF file needs llama.cpp: {install('gguf')}"
LEAST = -1e4  # log probability of a token that llama.cpp does not list


class LlamaCpp:
    """One loaded model: asked for one token, it gives the log probability of each."""

    def __init__(self, path: Path) -> None:
        """CannotRun without xllamacpp, or if llama.cpp does not load the file."""
        try:
            import xllamacpp
        except ImportError as error:
            raise CannotRun(INSTALL) from error
        metadata = GgufFile(path).metadata
        if metadata.get("tokenizer.ggml.model") == "no_vocab":
            raise CannotRun(NO_TOKENS)
        # A token that is half a character, or the end, gets no list of probabilities, so this one is always taken; the
        # list is of the model's own logits.
        pieces = enumerate(metadata["tokenizer.ggml.tokens"])
        self._taken = next((number for number, piece in pieces if piece.isascii() and piece.isalpha()), 0)
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_parallel, params.warmup, params.fit_params = 1, False, False
        params.n_ctx = 0  # as long as the model's
        params.verbosity = -1
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED  # it rounds to float16
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        try:
            self._server: Any = xllamacpp.Server(params)
        except (RuntimeError, ValueError) as error:
            raise CannotRun(f"llama.cpp does not load {path}: {error}") from error

    def log_probabilities(self, tokens: list[int] | str, vocab: int) -> np.ndarray:
        """Of the token after `tokens`, or after a text, float64."""
        asked = {
            "prompt": tokens, "n_predict": 1, "n_probs": vocab, "temperature": 0, "logit_bias": [[self._taken, 1e6]],
        }  # fmt: skip
        data = self._answer(asked)
        listed = data.get("completion_probabilities") or data["choices"][0]["logprobs"]["content"]
        values = np.full(vocab, LEAST)
        for entry in listed[0]["top_logprobs"]:
            values[entry["id"]] = entry["logprob"]
        return values

    def generate(
        self, tokens: list[int], count: int, temperature: float, seed: int, hand: Callable[[int], bool]
    ) -> None:
        """Hand over at most `count` new tokens, one by one, until `hand` returns True.

        Each is a request: of a stream, llama.cpp leaves out the tokens after which a character is unfinished. It keeps
        what it has computed, so a request still costs one token.
        """
        # without these, llama.cpp draws from the most likely tokens only
        whole = {"temperature": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        asked = {"n_predict": 1, "return_tokens": True, "verbose": True, **whole}
        ids, seeds = list(tokens), np.random.default_rng(seed)
        for _ in range(count):
            # 2^32 - 1 would make llama.cpp take a seed of its own
            data = self._answer({"prompt": ids, "seed": int(seeds.integers(2**32 - 1)), **asked})
            (token,) = data["__verbose"]["tokens"]
            if hand(token):
                return
            ids.append(token)

    def prompt_tokens(self, text: str) -> int:
        """How many tokens llama.cpp makes of a text, with those that it adds."""
        data = self._answer({"prompt": text, "n_predict": 1, "temperature": 0, "cache_prompt": False})
        return int(data["usage"]["prompt_tokens"] if "usage" in data else data["tokens_evaluated"])

    def _answer(self, asked: dict[str, Any]) -> Mapping[str, Any]:
        answer = self._server.handle_completions(asked)
        data: Mapping[str, Any] = answer if isinstance(answer, Mapping) else json.loads(answer)
        if "error" in data:
            raise CannotRun(f"llama.cpp does not answer: {data['error']}")
        return data


class Runtime:
    """See `bridge.targets.target.Runnable`; its output is log probabilities."""

    def __init__(self, path: Path) -> None:
        self.outputs, self.substitute, self.program = [LOG_PROBABILITIES], "", "llama.cpp"
        self._path, self._vocab = path, GgufFile(path).specs["token_embd.weight"].shape[0]
        self._engine = LlamaCpp(path)

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run each sequence, position by position: llama.cpp keeps what it has computed, so each costs one token."""
        rows = [
            [self._engine.log_probabilities(ids[: at + 1], self._vocab) for at in range(len(ids))]
            for ids in np.asarray(feeds["input_ids"]).tolist()
        ]
        return {self.outputs[0]: np.array(rows, np.float32)}

    def run_last(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The same of the last position of each sequence alone: llama.cpp lists the whole vocabulary for one."""
        rows = [self._engine.log_probabilities(ids, self._vocab) for ids in np.asarray(feeds["input_ids"]).tolist()]
        return {self.outputs[0]: np.array(rows, np.float32)[:, None]}

    def decoded(self) -> Source:
        """The file's weights in float, as a source, which torch runs at every position."""
        from bridge.sources.opening import open_source

        return open_source(self._path)


class Generator:
    """See `bridge.targets.generation.Generator`."""

    def __init__(self, path: Path) -> None:
        self._engine = LlamaCpp(path)
        self.runs = f"the file itself in llama.cpp (xllamacpp {version('xllamacpp')})"

    def generate(self, ids: Sequence[int], settings: Settings) -> Iterator[int]:
        def work(hand: Callable[[int], bool]) -> None:
            self._engine.generate(list(ids), settings.tokens, settings.temperature, settings.seed, hand)

        for token in from_thread(work):
            yield token
            if token in settings.stop:
                return
