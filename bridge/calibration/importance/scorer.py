"""Score parts of dims, and repair the matrices that read fewer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from bridge.calibration.importance.readers import Reader
from bridge.calibration.importance.sums import Channels, minitron_scores, output_scores, solve
from bridge.calibration.importance.watch import ScoreWatch
from bridge.core.files.matrices import AppendedFile
from bridge.sources.pruned.choose import choose
from bridge.sources.pruned.kept import At, Repaired
from bridge.sources.pruned.opening import Cut
from bridge.tables.expressions.selected_positions import Positions, kept_positions


class Scorer:
    """Scores by dim and place, and repaired matrices by stored name. `thin`: experts with too few tokens to repair.

    `repair`: the tokens that a channel needs for it; 0 repairs nothing.
    """

    def __init__(self, cut: Cut, importance: str, repair: int, by_importance: bool) -> None:
        self._cut, self._importance, self._repair, self._by_importance = cut, importance, repair, by_importance
        self._squares: dict[str, dict[At, Any]] = {}
        self._waiting: dict[str, dict[int, tuple[Channels, Any]]] = {}
        self._file: AppendedFile | None = None
        self.repaired: dict[str, Repaired] = {}
        self.thin: list[tuple[int, int]] = []

    def settle(self, reader: Reader, sums: Channels, weight: Any) -> None:
        """Score a matrix whose data have all passed, and repair it: a stack after its last expert."""
        place = (reader.layer, None if reader.stacked else reader.expert)
        squares = self._squares.setdefault(reader.dim, {})
        squares[place] = squares.get(place, 0) + self._of(reader, sums, weight).square()
        if not self._repair:
            return
        experts = self._waiting.setdefault(reader.tensor, {})
        experts[reader.expert or 0] = sums, weight.detach().clone()
        if not reader.stacked or len(experts) == self._cut.before["experts"]:
            self._write(reader, place, self._waiting.pop(reader.tensor))

    def _of(self, reader: Reader, sums: Channels, weight: Any) -> Any:
        """The score of each part of the reader's dim."""
        if self._importance == "minitron":
            return torch.zeros(reader.parts) if sums.minitron is None else minitron_scores(sums, reader.parts)
        if not sums.tokens:
            return torch.zeros(reader.parts)
        return output_scores(sums, weight, reader.parts)

    def _write(self, reader: Reader, place: At, experts: Mapping[int, tuple[Channels, Any]]) -> None:
        """Solve the matrices of a tensor for the kept channels, and put them into a file."""
        kept = self._kept(reader, place)
        solved = []
        for number, (sums, weight) in sorted(experts.items()):
            if sums.tokens < self._repair * len(kept):
                self.thin.append((reader.layer, number))
                new = weight[:, kept]
            else:
                new = solve(weight, sums.gram, kept)
            solved.append(new.T if reader.turned else new)
        stored = torch.stack(solved) if reader.stacked else solved[0]
        self._file = self._file or AppendedFile()
        self.repaired[reader.tensor] = Repaired.of(self._file, reader.tensor, stored, -2 if reader.turned else -1)

    def _kept(self, reader: Reader, place: At) -> Positions:
        """The kept channels of a reader's input."""
        scores = {reader.dim: {place: self._squares[reader.dim][place].sqrt().numpy()}}
        kept = choose(self._cut.before, self._cut.after, scores, self._by_importance)
        shape = self._cut.matched.table.roles.roles[reader.role].shape
        return kept_positions(
            shape[1], lambda dim: kept.positions(dim, reader.layer, place[1]), self._cut.matched.names
        )

    def scores(self, watch: ScoreWatch) -> dict[str, dict[At, np.ndarray]]:
        """All scores that the cut needs, after the run."""
        found = {
            dim: {at: squares.sqrt().float().numpy() for at, squares in places.items()}
            for dim, places in self._squares.items()
        }
        if watch.norms:
            found["hidden"] = {(None, None): self._hidden(watch)}
        if watch.influence:
            layers = [watch.influence[layer] for layer in range(self._cut.before["layers"])]
            found["layers"] = {(None, None): np.array(layers)}
        if watch.expert_norms:
            found["experts"] = {}
            for layer in sorted({layer for layer, _ in watch.expert_norms}):
                pairs = (watch.expert_norms.get((layer, e), (0.0, 0)) for e in range(self._cut.before["experts"]))
                found["experts"][layer, None] = np.array([norm / (tokens + 1e-8) for norm, tokens in pairs], np.float32)
        return found

    def _hidden(self, watch: ScoreWatch) -> np.ndarray:
        """The sum over the norms before attention and MLP of their outputs' norms."""
        each = [sums.minitron.pow(0.5) if self._importance == "minitron" else sums.rms for sums in watch.norms.values()]
        total: np.ndarray = torch.stack(each).sum(dim=0).numpy()
        return total
