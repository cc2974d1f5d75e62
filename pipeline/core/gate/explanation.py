"""A decision as a paragraph that a person understands (X5). Pure text, made of what the log holds alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from msgspec import Struct

from pipeline.core.gate.answer import Obstacle
from pipeline.core.gate.explanation_numbers import (
    amount,
    counted_as,
    listed,
    metric_words,
    moment,
    share_words,
    time_of_day,
)
from pipeline.core.gate.explanation_reasons import (
    SCOPES_SAID,
    Account,
    Reason,
    cause_of,
    details,
    finding,
    others,
    reasons_of,
    sentence,
)
from schemas.control import Decision, Directive
from schemas.versions import version_keys


class Explanation(Struct, frozen=True, kw_only=True):
    """A decision for people. `text`: sentences; `reasons`: what they were made of, the deciding one first."""

    text: str
    reasons: tuple[Reason, ...] = ()


def explain(account: Account) -> Explanation:
    """Any decision that this release can read, whatever an older one left out of it."""
    reasons = tuple(reasons_of(account))
    tell = _TOLD.get(account.decision.kind, _other)
    return Explanation(text=" ".join(_clean(tell(account, reasons))), reasons=reasons)


def waiting_text(obstacles: Iterable[Obstacle], step: str = "") -> str:
    """What the next weight step has to wait for, and for how long. `step`: when it is due, as status says."""
    told = [one.sentence for one in obstacles]
    if not told:
        return f"Nothing is in the way of the next weight step{f' ({step})' if step else ''}."
    text = f"The next weight step waits for this: {'; '.join(told)}."
    return f"{text} All in all: {step}." if step else text


# --- kinds ---------------------------------------------------------------------------------------------


def _trip(account: Account, reasons: tuple[Reason, ...]) -> Iterable[str]:
    first = reasons[0] if reasons else None
    why = "" if first is None else f" because {finding(first)}"
    yield f"{_taken_out(account)}{why}."
    if first is not None:
        yield from details(first)
        yield from others(reasons[1:])
    yield _judged_on(account.decision)
    yield _level(account)
    yield from _further(account.decision)
    yield _final(account)


def _pause(account: Account, reasons: tuple[Reason, ...]) -> Iterable[str]:
    held = f"The weight of {_canary(account)} was held at {_percent(account)}{_when(account)}"
    if reasons:
        yield f"{held} because {finding(reasons[0])}."
        yield from details(reasons[0])
        yield from others(reasons[1:])
    else:
        yield f"{held}{_because(account)}."
        yield from _low_coverage(account.decision)
    yield _judged_on(account.decision)
    yield f"It stays there until an operator resumes it: `klaxon rollout resume {account.rollout}`."


def _step(account: Account, _: tuple[Reason, ...]) -> Iterable[str]:
    before, now = _share_before(account), _share(account, account.decision.directive)
    rose = f" from {before:g} % to {now:g} %" if before is not None and now is not None else ""
    yield f"The weight of {_canary(account)} rose{rose}{_when(account)}: every rule that enforces passed."
    yield _measured(account)
    yield _judged_on(account.decision)


def _promote(account: Account, _: tuple[Reason, ...]) -> Iterable[str]:
    yield f"{_canary(account, start=True)} was promoted{_when(account)}: it gets all traffic now."
    yield _measured(account)
    yield _judged_on(account.decision)


def _coverage(account: Account, _: tuple[Reason, ...]) -> Iterable[str]:
    if account.decision.kind == "hold":
        yield f"Weight steps were suspended{_when(account)}{_because(account)}."
        yield from _low_coverage(account.decision)
        yield "They go on by themselves once coverage is back; what trips, trips meanwhile."
    else:
        yield f"Weight steps became possible again{_when(account)}{_because(account)}."
    yield _judged_on(account.decision)


def _advise(account: Account, reasons: tuple[Reason, ...]) -> Iterable[str]:
    yield f"Nothing was moved{_when(account)}, but a rule that only observes or advises speaks."
    for one in reasons:
        yield f"{finding(one, start=True)}."
    if not reasons and account.decision.reason:
        yield f"{sentence(account.decision.reason)}."
    yield _judged_on(account.decision)
    yield "It says so once in a generation."


def _gap(account: Account, _: tuple[Reason, ...]) -> Iterable[str]:
    yield f"Evidence is missing for good, found{_when(account)}{_because(account)}."
    yield f"Nobody can say what those seconds held, so the weight is held at {_percent(account)}."
    yield f"It stays there until an operator has looked: `klaxon rollout resume {account.rollout}`."


def _lesser(account: Account, reasons: tuple[Reason, ...]) -> Iterable[str]:
    """A node ejected, a segment excluded, and their return: the directive says what is out now."""
    directive, before = account.decision.directive, _directive(account.before)
    nodes_before = () if before is None else before.ejected_nodes
    parts_before = () if before is None else before.excluded_segments
    nodes = () if directive is None else directive.ejected_nodes
    parts = () if directive is None else directive.excluded_segments
    out = [f"node `{name}`" for name in nodes if name not in nodes_before]
    out += [f"{one.dimension} `{one.value}`" for one in parts if one not in parts_before]
    back = [f"node `{name}`" for name in nodes_before if name not in nodes]
    back += [f"{one.dimension} `{one.value}`" for one in parts_before if one not in parts]
    why = f" because {finding(reasons[0])}" if reasons else _because(account)
    if out:
        yield f"{sentence(listed(out))} of the canary gets no traffic any more{_when(account)}{why}."
    if back:
        after = "" if out else why
        yield f"{sentence(listed(back))} of the canary gets traffic again{_when(account)}{after}."
    if not out and not back:
        yield f"{sentence(account.decision.reason or 'nothing is said')}{_when(account)}."
    if reasons:
        yield from details(reasons[0])
        yield from others(reasons[1:])
    yield _out_now(directive)
    yield _judged_on(account.decision)
    yield f"The weight stands at {_percent(account)}."


def _reassert(account: Account, _: tuple[Reason, ...]) -> Iterable[str]:
    yield f"The gate said its directive again{_when(account)}{_because(account)}."
    yield "The run, its weights and its evidence are the same; find out who else may write `klaxon.control`."


def _refused(account: Account, _: tuple[Reason, ...]) -> Iterable[str]:
    command, _colon, reason = account.decision.reason.partition(": ")
    why = f": {reason}" if reason else ""
    yield f"An operator's `{command}` was refused{_when(account, generation=False)}{why}."
    directive = account.decision.directive
    if directive is None:
        yield "Nothing was moved."
        return
    yield f"Nothing was moved: generation {directive.generation} is {directive.state} at {_split(directive)}."
    lacking = [one for one in account.decision.evaluations if one.verdict in ("not_enough_data", "error")]
    if lacking:
        yield f"Missing: {'; '.join(f'{one.rule}: {one.reason}' for one in lacking[:SCOPES_SAID])}."


def _command(account: Account, _: tuple[Reason, ...]) -> Iterable[str]:
    name, _colon, reason = account.decision.reason.partition(": ")
    directive, cause = account.decision.directive, cause_of(account.decision)
    if name == "abort":
        by = "" if cause is None else " ".join(cause.also).removeprefix("by ")
        yield f"{_taken_out(account)} because an operator aborted it" + (f" (`{by}`)." if by else ".")
        yield "No rule is behind it."
        yield _final(account)
        return
    yield f"An operator's `{name}` was obeyed{_when(account)}{f': {reason}' if reason else ''}."
    if directive is None:
        return
    yield f"The roll-out is {directive.state}, at {_split(directive)}."
    if name in ("start", "new-generation") and account.policy is not None:
        enforcing = [rule.id for rule in account.policy.rules if rule.enforcing]
        yield f"It is judged by {listed(enforcing)}." if enforcing else "No rule of its policy enforces."
    if name in ("step", "promote"):
        yield _measured(account)
    if name == "retire" and cause is not None:
        yield f"What had ended it: {cause.rule}."


def _other(account: Account, reasons: tuple[Reason, ...]) -> Iterable[str]:
    yield f"A decision of the kind {account.decision.kind} fell{_when(account)}{_because(account)}."
    yield from others(reasons)


_TOLD: Final[dict[str, Callable[[Account, tuple[Reason, ...]], Iterable[str]]]] = {
    "trip": _trip,
    "pause": _pause,
    "step": _step,
    "promote": _promote,
    "hold": _coverage,
    "close": _coverage,
    "advise": _advise,
    "gap": _gap,
    "eject": _lesser,
    "narrow": _lesser,
    "reassert": _reassert,
    "refused": _refused,
    "command": _command,
}


# --- pieces --------------------------------------------------------------------------------------------


def _taken_out(account: Account) -> str:
    """Who lost traffic, to whom, when."""
    directive = account.decision.directive
    subject = _canary(account, start=True)
    before, now = _share_before(account), _share(account, directive)
    weight = f"weight {before:g} % to {now or 0:g}" if before else f"weight {now or 0:g}"
    fallback = ""
    if directive is not None and account.decision.reason.startswith("fallback"):
        fallback = f", everybody moved to the fallback version `{directive.fallback}`"
    return f"{subject} was taken out of rotation ({weight}){fallback}{_when(account)}"


def _because(account: Account) -> str:
    return f": {account.decision.reason}" if account.decision.reason else ""


def _further(decision: Decision) -> Iterable[str]:
    """What a trip's reason says beside action and rules: that more than a few nodes are ill, for instance."""
    for part in decision.reason.split("; ")[1:]:
        if not part.startswith("level 2"):
            yield f"{sentence(part)}."


def _final(account: Account) -> str:
    directive = account.decision.directive
    number = "this generation" if directive is None else f"generation {directive.generation}"
    return f"That is final in {number}: `klaxon rollout new-generation {account.rollout}` begins anew."


def _level(account: Account) -> str:
    """What a level-2 roll-back asks for, and why it came to that."""
    directive = account.decision.directive
    if directive is None or directive.level != 2:
        return ""
    ask = "The roll-back is of level 2: the weight alone is not enough, roll the image back."
    if "trips in a row" not in account.decision.reason:
        return ask
    earlier = [f"{one.directive.generation}" for one in account.trips if one.directive is not None]
    row = account.decision.reason.rpartition("after ")[2].partition(" ")[0]
    if row.isdecimal() and earlier:
        shown = earlier[-(int(row) - 1) :] if int(row) > 1 else []
        if shown:
            return (
                f"{ask} It is trip {row} in a row, after generation{'s' * (len(shown) > 1)} {listed(shown)}."
            )
    return f"{ask} It is trip {row} in a row."


def _judged_on(decision: Decision) -> str:
    """Which seconds were known when it fell."""
    through = decision.inputs.complete_through
    if through < 0:
        return ""
    last = time_of_day((through + 1) * 1_000_000)
    if any(source.startswith("~") for source in decision.inputs.offsets):
        return f"It fell on fresh evidence; complete was everything before {last}."
    return f"It fell on complete seconds, up to {last}."


def _measured(account: Account) -> str:
    """What the rules and coverage said of the whole roll-out."""
    quiet = (
        set() if account.policy is None else {rule.id for rule in account.policy.rules if not rule.enforcing}
    )
    said = [
        f"{one.rule}: {metric_words(one.metric)} {amount(one.metric, one.value, one.limit)}"
        + ("" if one.limit is None else f" (limit {amount(one.metric, one.limit)})")
        + f" from {counted_as(one.metric, one.samples)}"
        for one in account.decision.evaluations
        if one.scope == "rollout" and one.value is not None and one.rule not in quiet
    ]
    return f"{sentence('; '.join(said))}." if said else ""


def _low_coverage(decision: Decision) -> Iterable[str]:
    for one in decision.evaluations:
        if one.rule == "coverage" and one.value is not None:
            yield (
                f"Of {one.samples:,} mirrored requests {share_words(one.value)} could be compared; what is"
                " missing may be what is broken."
            )


def _out_now(directive: Directive | None) -> str:
    if directive is None or not (directive.ejected_nodes or directive.excluded_segments):
        return ""
    out = [f"node `{name}`" for name in directive.ejected_nodes]
    out += [f"{one.dimension} `{one.value}`" for one in directive.excluded_segments]
    return f"Out of rotation now: {', '.join(out)}."


def _canary(account: Account, *, start: bool = False) -> str:
    """`the canary `v2``; without its name where the log does not tell which version it is."""
    name = _canary_version(account)
    return f"{'The' if start else 'the'} canary{f' `{name}`' if name else ''}"


def _canary_version(account: Account) -> str:
    if account.spec is not None and {"baseline", "canary"} <= set(account.spec.arms):
        return version_keys(account.spec.arms)["canary"]
    directive = account.decision.directive
    if directive is None or len(directive.weights) != 2:
        return ""
    # A roll-out never falls back to its canary: of two versions it is the other one.
    others = [version for version in directive.weights if version != directive.fallback]
    return others[0] if len(others) == 1 else ""


def _share(account: Account, directive: Directive | None) -> float | None:
    if directive is None:
        return None
    return directive.weights.get(_canary_version(account))


def _share_before(account: Account) -> float | None:
    return _share(account, _directive(account.before))


def _percent(account: Account) -> str:
    share = _share(account, account.decision.directive)
    directive = account.decision.directive
    if share is not None:
        return f"{share:g} %"
    return "where it was" if directive is None else _split(directive)


def _split(directive: Directive) -> str:
    return listed([f"`{version}` {percent:g} %" for version, percent in directive.weights.items()])


def _when(account: Account, *, generation: bool = True) -> str:
    directive = account.decision.directive
    number = f" in generation {directive.generation}" if generation and directive is not None else ""
    return f"{number} at {moment(account.decision.inputs.now_us)}"


def _directive(decision: Decision | None) -> Directive | None:
    return None if decision is None else decision.directive


def _clean(sentences: Iterable[str]) -> Iterable[str]:
    return (one for one in sentences if one)
