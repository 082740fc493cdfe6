"""The kinds of faults: each strikes a command at random points, and tells what was wrong afterwards.

The same seed strikes the same points, as long as the command makes as many calls; those by time are near.
"""

from __future__ import annotations

import errno
import json
import random
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bridge.core.output.names import JOURNAL
from bridge.core.remote.upload import LAST
from bridge.core.remote.upload_note import NOTE
from bridge.workflows.batch.run import KEPT as KEPT_ROWS
from tests.faults.commands import COMMANDS, Command
from tests.faults.stand import Calm, Stand
from tests.faults.struck import Ended, complaints, contents, differing, left, left_over

Fault = dict[str, Any]
FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk is full", errno.EIO: "Input/output error"}
WORKER = "was killed by SIGKILL during the job"
# What a stopped command may say: that it keeps what is done, in a hidden directory, or of the rows of a batch.
KEPT = rf"what is done is kept in (?P<work>\S+); .*|{re.escape(KEPT_ROWS)}.*|nothing half-written is left"


def shares(points: int, kind: str) -> dict[str, int]:
    """How many points each command that the kind strikes gets, so that all together have `points` at least."""
    struck = [command for command in COMMANDS if struck_by(kind, command)]
    whole = sum(command.weight for command in struck)
    return {command.name: -(-points * command.weight // whole) for command in struck}


def killed(command: Command, stand: Stand, points: int, seed: int) -> list[str]:
    """kill -9; the same command again ends with the bytes of an undisturbed run, and nothing is left over.

    A quarter by time (one at least, of two); the rest before, or inside, a call that changes the disk or talks to a
    store; among them the last ones, which rename and remove. Every third point has a second kill, of the second run.
    """
    calm, drawn = stand.calm(command), random.Random(f"{seed} {command.name}")
    timed = max(points // 4, min(points - 1, 1))
    ends = [calm.calls, calm.calls - 1, calm.calls - 2][: max(points // 5, 1)]
    counted = ends + drawn.sample(range(1, calm.calls - 2), min(points - timed - len(ends), calm.calls - 3))
    kills: list[Fault] = [{"at": at, "action": "kill"} for at in counted]
    kills += [{"after": drawn.uniform(0, calm.seconds)} for _ in range(timed)]
    wrong = []
    for number, kill in enumerate(kills):
        second = {"at": drawn.randrange(1, max(calm.calls // 3, 2)), "action": "kill"}
        faults = [kill, second] if number % 3 == 1 else [kill]
        wrong += [f"{faults}: {text}" for text in _killed(command, stand, faults, calm)]
    return wrong


def _killed(command: Command, stand: Stand, faults: list[Fault], calm: Calm) -> list[str]:
    place, argv = stand.place(command)
    old, wrong = _visible(stand, place, command), list[str]()
    for fault in faults:
        seen = _visible(stand, place, command)
        died = stand.run(command, place, argv, **fault)
        ended = died.code in (-9, 0) or _found_finished(command, seen, died)
        wrong += [] if ended else [f"ended with {died.code}: {died.said}"]
        wrong += _outlived(died) + _halves(command, stand, place, calm, old)
        if died.code == 0:
            break
    return wrong + _again(command, stand, place, argv, calm)


def _again(command: Command, stand: Stand, place: Path, argv: list[str], calm: Calm) -> list[str]:
    """Run it once more in the same place; what is wrong then. It may find that all was finished."""
    seen = _visible(stand, place, command)
    again = stand.run(command, place, argv)
    ended = again.code == 0 or _found_finished(command, seen, again)
    wrong = [] if ended else [f"again it ended with {again.code}: {again.said}"]
    wrong += [f"other bytes in {names}"] if (names := differing(stand.found(command, place), calm.out)) else []
    wrong += [f"left over: {over}"] if (over := left_over(place)) else []
    wrong += [f"not ended: {open}"] if command.far and (open := stand.store.uploads(place.name)) else []
    return wrong + _outlived(again)


def _found_finished(command: Command, seen: dict[str, dict[str, bytes]], ended: Ended) -> bool:
    """True where the run before was killed when its output was there already, so that this one had nothing to do."""
    return not command.before and bool(seen.get("out")) and ended.code == 1 and "exists already" in ended.said


def worker_killed(command: Command, stand: Stand, points: int, seed: int) -> list[str]:
    """kill -9 of one worker of a batch: its job fails, no other; the batch again ends with the same bytes.

    A quarter by time, the rest before, or inside, a call of the worker that changes the disk. Which job it has then
    differs from run to run, and it may end before.
    """
    drawn, workers = random.Random(f"{seed} {command.name}"), range(command.workers)
    calls, seconds = [stand.calm(command, worker=n).calls for n in workers], stand.calm(command).seconds
    faults: list[Fault] = []
    for number in range(points):
        worker = drawn.choice(workers)
        by_time = {"after": drawn.uniform(0, 0.5) * seconds}
        by_count = {"at": drawn.randint(1, calls[worker]), "action": "kill"}
        faults.append({"worker": worker} | (by_time if number % 4 == 3 else by_count))
    wrong, struck = [], 0
    for fault in faults:
        place, argv = stand.place(command)
        ended = stand.run(command, place, argv, **fault)
        told, failed = _outlived(ended), _failed_rows(place, ended)
        struck += bool(failed)
        alone = [row for row in failed if not row["because"]]  # the rest waited for a calibration that failed
        if ended.code != bool(failed) or len(alone) > 1 or any(WORKER not in row["error"] for row in failed):
            told.append(f"ended with {ended.code}: {ended.said}, {failed}")
        told += _halves(command, stand, place, stand.calm(command), {})
        told += _again(command, stand, place, argv, stand.calm(command))
        wrong += [f"{fault}: {text}" for text in told]
    return (
        wrong if 2 * struck >= points else [*wrong, f"of {points} workers {struck} were killed in the middle of a job"]
    )


def _failed_rows(place: Path, ended: Ended) -> list[dict[str, str]]:
    """What the summary of a batch says about rows that failed; where there is none, what the batch said."""
    summary = place / "out" / "summary.json"
    if not summary.exists():
        return [{"error": f"no summary: {ended.said}", "because": ""}]
    rows = json.loads(summary.read_text())["rows"]
    return [row for row in rows if row["status"] == "failed"]


def signalled(command: Command, stand: Stand, points: int, seed: int) -> list[str]:
    """SIGTERM and Ctrl-C, half of them at a call, half by time, of which every second one comes twice."""
    calm, drawn = stand.calm(command), random.Random(f"{seed} {command.name}")
    counted = drawn.sample([1, calm.calls, calm.calls - 1], min(points - points // 2, 3))
    counted += drawn.sample(range(2, calm.calls - 1), points - points // 2 - len(counted))
    faults: list[Fault] = [{"at": at, "action": "signal", "number": _number(drawn)} for at in counted]
    for again in range(points // 2):
        faults.append({"after": drawn.uniform(0.1, 0.9) * calm.seconds, "signals": [_number(drawn)] * (1 + again % 2)})
    wrong = []
    for fault in faults:
        number = fault["number"] if "number" in fault else fault["signals"][0]
        if command.far:
            wrong += [f"{fault}: {text}" for text in _stopped_sending(command, stand, fault, number)]
            continue
        place, argv = stand.place(command)
        old = contents(place / "out")
        ended = stand.run(command, place, argv, **fault)
        wrong += [f"{fault}: {text}" for text in _half_written(command, place, ended, number, old, calm.out)]
        wrong += [f"{fault}: {text}" for text in (_again(command, stand, place, argv, calm) if ended.code else ())]
    return wrong


def _stopped_sending(command: Command, stand: Stand, fault: Fault, number: int) -> list[str]:
    """Run a far command with a signal; what is wrong then. It tells what it has sent, or else has sent nothing.

    The same command again ends with the bytes of an undisturbed run.
    """
    place, argv = stand.place(command)
    old, there, calm = _visible(stand, place, command), left(place), stand.calm(command)
    ended = stand.run(command, place, argv, **fault)
    seen, name = _visible(stand, place, command), signal.Signals(number).name
    wrong = [] if ended.code in (128 + number, 0) else [f"ended with {ended.code}"]
    sent = re.fullmatch(
        rf"stopped by {name}; (\d+) of (\d+) files are at {re.escape(stand.store.address(place.name))}, and nothing "
        r"takes them for a model; the finished one is kept in (.*)\. Run again to send the rest\n",
        ended.said,
    )
    if sent:
        wrong += [] if int(sent[1]) <= int(sent[2]) == len(calm.out) and Path(sent[3]).is_dir() else [f"said {sent[0]}"]
    elif ended.said.startswith(f"stopped by {name}; a note, {NOTE}, may be at"):
        wrong += [f"more than a note: {sorted(seen['out'])}"] if _but_note(seen) != _but_note(old) else []
    elif (said := re.fullmatch(rf"stopped by {name}; (?:{KEPT})\n", ended.said)) and said["work"]:
        wrong += [] if seen == old and Path(said["work"]).is_dir() else [f"said {ended.said}"]
    elif ended.code and not said:
        wrong.append(f"said {ended.said}")
    elif ended.code and seen != _visible(stand, calm.place, command):
        wrong += [f"sent {sorted(seen['out'])}, and does not say so"] if seen != old else []
        wrong += [f"left, and does not say so: {left(place)}"] if left(place) != there else []
    wrong += _outlived(ended) + _halves(command, stand, place, calm, old)
    return wrong + _again(command, stand, place, argv, calm)


def _but_note(seen: dict[str, dict[str, bytes]]) -> dict[str, bytes]:
    return {name: content for name, content in seen["out"].items() if name != NOTE}


def _number(drawn: random.Random) -> signal.Signals:
    return drawn.choice([signal.SIGTERM, signal.SIGINT])


def _half_written(
    command: Command, place: Path, ended: Ended, number: int, old: dict[str, bytes], whole: dict[str, bytes]
) -> list[str]:
    """What is wrong after a signal. What is kept lies in hidden directories, and the command says so."""
    wrong = [] if ended.code in (128 + number, 0) else [f"ended with {ended.code}"]
    said = re.fullmatch(rf"stopped by {signal.Signals(number).name}; (?:{KEPT})\n", ended.said)
    if ended.code and not said:
        wrong.append(f"said {ended.said}")
    if said and said["work"] and not (Path(said["work"]) / JOURNAL).is_file():
        wrong.append(f"kept nothing, and said {ended.said}")
    keeps = said is not None and "kept" in said[0]
    seen = contents(place / "out")
    for part in command.parts:
        here, was, will = (_part(files, part) for files in (seen, old, whole))
        if here not in ({}, was, will) or (was and not here):
            wrong.append(f"half of {part} is visible: {sorted(here)}")
    if hidden := [name for name in seen if name not in whole and any(part[0] == "." for part in Path(name).parts)]:
        wrong += [] if keeps else [f"left over: {hidden}"]
    if ended.code == 0 and differing(seen, whole):
        wrong.append("says it is done, and is not")
    over = [name for name in left_over(place) if not (keeps and ".partial/" in name)]
    wrong += [f"left over: {over}"] if over else []
    return wrong + _outlived(ended)


def refused(command: Command, stand: Stand, points: int, seed: int) -> list[str]:
    """A disk that is full, over quota or broken from a call on: one clear error, and what was there stays."""
    calm, drawn = stand.calm(command, "space"), random.Random(f"{seed} {command.name}")
    faults = [
        {"at": at, "action": "fail", "number": drawn.choice([*FULL]), "classes": ["space"], "lasting": True}
        for at in drawn.sample(range(1, calm.calls + 1), min(points, calm.calls))
    ]
    return [f"{fault}: {text}" for fault in faults for text in _failed(command, stand, fault, FULL[fault["number"]])]


def unread(command: Command, stand: Stand, points: int, seed: int) -> list[str]:
    """A source that cannot be read from a call on: one clear error that names the file, and what was there stays."""
    calm, drawn = stand.calm(command, "read"), random.Random(f"{seed} {command.name}")
    failing = {"action": "fail", "number": errno.EIO, "classes": ["read"], "lasting": True, "folder": str(stand.given)}
    faults = [failing | {"at": at} for at in drawn.sample(range(1, calm.calls + 1), min(points, calm.calls))]
    files = {path.name for path in stand.given.rglob("*")}
    return [
        f"{fault}: {text}" for fault in faults for text in _failed(command, stand, fault, "Input/output error", files)
    ]


def _failed(
    command: Command, stand: Stand, fault: Fault, words: str, names: set[str] | frozenset[str] = frozenset()
) -> list[str]:
    """Run it with calls that fail; what is wrong then. One of `names` must be in what it says, where there are any.

    Rows of a batch that ended before stay. What a command says that it keeps, and a batch, go on to the same bytes.
    """
    place, argv = stand.place(command)
    before, there = contents(place), left(place)
    ended = stand.run(command, place, argv, **fault)
    wrong = complaints(ended, 1, words)
    wrong += [f"names no file: {ended.said}"] if names and not any(name in ended.said for name in names) else []
    if command.manifest:
        calm = stand.calm(command)
        return wrong + _halves(command, stand, place, calm, {}) + _again(command, stand, place, argv, calm)
    kept = re.search(r"what is done is kept in (\S+);", ended.said)
    inside = f"{Path(kept[1]).relative_to(place)}/" if kept else "/"
    wrong += [f"kept nothing, and said {ended.said}"] if kept and not (Path(kept[1]) / JOURNAL).is_file() else []
    seen = {name: content for name, content in contents(place).items() if not name.startswith(inside)}
    wrong += [f"changed: {changed}"] if (changed := differing(seen, before)) else []
    over = [name for name in left(place) if not name.startswith(inside)]
    wrong += [f"left: {over}"] if over != there else []
    return wrong + (_again(command, stand, place, argv, stand.calm(command)) if kept else [])


def _halves(command: Command, stand: Stand, place: Path, calm: Calm, old: dict[str, dict[str, bytes]]) -> list[str]:
    """What is seen and is neither nothing nor what lay there nor what an undisturbed run writes."""
    whole, wrong = _visible(stand, calm.place, command), []
    for part, seen in _visible(stand, place, command).items():
        versions = ({}, old.get(part), whole[part])
        if seen not in versions and not (command.far and _is_no_model(seen, versions)):
            wrong.append(f"half of {part} is visible: {sorted(seen)}")
    return wrong


def _is_no_model(seen: dict[str, bytes], versions: tuple[dict[str, bytes] | None, ...]) -> bool:
    """True where a note tells of sending, and what makes a model, where some of it is there, is of all the rest."""

    def rest(files: dict[str, bytes]) -> dict[str, bytes]:
        return {name: files[name] for name in files if Path(name).name not in (*LAST, NOTE)}

    marks = {name: seen[name] for name in seen if Path(name).name in LAST}
    return NOTE in seen and (
        not marks or any(rest(seen) == rest(files) and marks.items() <= files.items() for files in versions if files)
    )


def _outlived(ended: Ended) -> list[str]:
    wrong = [f"still running: {ended.orphans}"] if ended.orphans else []
    return wrong + ([f"left in shared memory: {ended.shared}"] if ended.shared else [])


def _visible(stand: Stand, place: Path, command: Command) -> dict[str, dict[str, bytes]]:
    """What is seen of each part; a journal that was not removed yet is nobody's."""
    found = {part: contents(place / part) for part in command.parts if not command.far}
    found |= {"out": stand.found(command, place)} if command.far else {}
    return {part: {name: seen[name] for name in seen if name != JOURNAL} for part, seen in found.items()}


def _part(files: dict[str, bytes], part: str) -> dict[str, bytes]:
    """Of the files in `out`, those of one part of it."""
    return {name: files[name] for name in files if f"out/{name}".startswith(f"{part}/")}


KINDS: dict[str, Callable[[Command, Stand, int, int], list[str]]] = {
    "kill": killed,
    "kill a worker": worker_killed,
    "signal": signalled,
    "full disk": refused,
    "read error": unread,
}


def struck_by(kind: str, command: Command) -> bool:
    """True where the kind of fault can strike the command here: only batches have workers, not all read `given`."""
    if command.kinds:
        return kind in command.kinds
    if kind == "kill a worker":
        return bool(command.manifest)
    return kind != "read error" or "{given}" in " ".join(command.argv)
