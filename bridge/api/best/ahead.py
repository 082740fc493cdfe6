"""What is known of a choice among rules before any is measured."""

from __future__ import annotations

from dataclasses import replace

from bridge.api.best.candidates import Candidates
from bridge.api.best.choose import (
    check_unused_arguments,
    choose_rule,
    data_of_rules,
    found_for,
    taking,
    unmeasured,
    without_data,
)
from bridge.api.conversion import noting_rule
from bridge.api.request import Request, ResolvedRequest, resolve
from bridge.planning.structure import structure_of
from bridge.quant.calibration import Calibration
from bridge.quant.schemes.recipe import layout_asked
from bridge.sources.source import Source


def resolve_ahead(source: Source, request: Request, here: bool = True) -> tuple[ResolvedRequest, Candidates | None]:
    """The plan of a request, and the rules that it will measure; None where it names a scheme, or measures nothing.

    The plan is that of the rule that needs most. `here`: whether it runs on this machine, whose data count.
    """
    if layout_asked(request.quant) is None:
        check_unused_arguments(request)
        return resolve(source, request), None
    found = found_for(source, request, structure_of(source))
    chosen = unmeasured(found, source, request)
    if chosen is None and here and (why := data_of_rules(found, source, request)[1]):
        chosen = without_data(found, why)
    if chosen is None:
        return resolve(source, replace(request, quant=found.rules[0].quant, candidates=None)), found
    return noting_rule(resolve(source, taking(request, chosen)), chosen.why), None


def digest_as_measured(source: Source, request: Request, calibration: Calibration) -> str:
    """The digest of the plan with the rule that a calibration was made for."""
    taken, why = choose_rule(source, replace(request, calib=calibration, data=None))
    return noting_rule(resolve(source, taken), why).plan.digest
