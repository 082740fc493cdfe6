"""`qbridge run`: `bridge.run` and `bridge.chain` as a command."""

from __future__ import annotations

from typing import Annotated

import bridge
from bridge.calibration.walk.workers.processes import launched
from bridge.cli.arguments import Debug, Json
from bridge.cli.terminal import session
from bridge.cli.verb import Argument, Option, verb
from bridge.core.errors import UsageError


@verb('qbridge run llama-fp8 "The capital of France is"')
def run(
    out: Annotated[str, Argument(metavar="OUT", help="a written model, or a chain of steps (.toml)")],
    text: Annotated[str | None, Argument(metavar="[TEXT]", help="what the model continues")] = None,
    tokens: Annotated[int, Option(help="number of tokens at most")] = 64,
    chat: Annotated[bool, Option("--chat", help="put TEXT into the model's chat template")] = False,
    temperature: Annotated[float, Option(help="0 takes the most likely token; above 0, tokens are drawn")] = 0.0,
    seed: Annotated[int, Option(help="of the random numbers")] = 0,
    image: Annotated[list[str] | None, Option(metavar="FILE", help="for a model that sees; may be repeated")] = None,
    audio: Annotated[list[str] | None, Option(metavar="FILE", help="a WAV, for a model that hears")] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="of a chain: replace what is there")] = False,
    no_resume: Annotated[bool, Option("--no-resume", help="of a chain: begin all steps again")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Continue a text with a written model, or run a chain.

    The last line has the tokens per second, and with what the model ran.
    """
    is_chain = out.endswith(".toml")
    with session(debug=debug, silent=is_chain and launched()[0] > 0) as terminal:
        if is_chain:
            if text is not None:
                raise UsageError(f"{out} is a chain of steps, which takes no text")
            for given, what, option in ((image, "images", "--image"), (audio, "sounds", "--audio")):
                if given:
                    raise UsageError(f"{out} is a chain of steps, which takes no {what}; leave out {option}")
            made = bridge.chain(out, overwrite=overwrite, resume=not no_resume, progress=terminal.progress)
            terminal.finish(made, "\n".join(made.lines()), as_json, False)
            return
        if text is None and not image and not audio:
            raise UsageError(f'give the text that {out} continues: qbridge run {out} "The capital of France is"')
        terminal.progress(0, 0, "load")
        stream = None if as_json else terminal.write
        result = bridge.run(
            out, text or "", tokens=tokens, chat=chat, temperature=temperature, seed=seed, image=image, audio=audio,
            stream=stream,
        )  # fmt: skip
        terminal.print(result.to_json() if as_json else f"\n{result}")
