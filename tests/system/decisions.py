"""Expected decisions of a roll-out, from the oracle's buckets and the numbers of `workload.policy`.

Plain and slow, from architecture.md ("Gating") and decisions.md; shares no code with the gate. Every complete
second is judged in order. A trip on fresh evidence may come before the one on complete seconds and ends the
generation there; everything before it must be as on complete seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

from tests.oracle.bins import edges
from tests.system import workload as w
from tests.system.findings import Finding, Kind

JOIN_TIMEOUT_S: Final = 3
LATENESS_S: Final = 1
DIMENSIONS: Final = {"rollout": "all", "node": "node", "context": "context", "node_context": "node_context"}
VERSIONS: Final = {"baseline": "m1", "canary": "m2", "control": "m1"}
MAY_DIFFER: Final = {"baseline": 0, "canary": 1, "control": 0}
TRIPPING: Final = ("everywhere", "long_prompts_of_one_node", "slow", "twice")

Contents = Mapping[int, Mapping[Any, Mapping[tuple[str, str], Any]]]
Scope = tuple[str, str]


@dataclass(frozen=True)
class Evidence:
    """Closed content of all partitions of the logits and of the requests."""

    logits: tuple[Contents, ...]
    requests: tuple[Contents, ...]
    complete_through: int


@dataclass(frozen=True)
class Generation:
    """A generation as the command decision that began it says."""

    number: int
    start_us: int
    folded: int
    """Newest second the gate had done with."""

    @property
    def start_second(self) -> int:
        """First whole second."""
        return -(-self.start_us // 1_000_000)

    @property
    def evidence_from(self) -> int:
        """First second that counts."""
        return max(self.start_second - LATENESS_S - 1, self.folded + 1)


@dataclass(frozen=True)
class Judged:
    """What is known of one complete second: (rule, scope) → (value, samples, verdict)."""

    second: int
    evaluations: dict[tuple[str, str], tuple[float | None, int, str]]
    coverage_low: bool
    pairs: int

    def verdict(self, rule: str) -> str:
        """The rule's: any scope may trip, the roll-out's passes."""
        verdicts = {
            scope: verdict for (name, scope), (_, _, verdict) in self.evaluations.items() if name == rule
        }
        return "trip" if "trip" in verdicts.values() else verdicts["rollout"]


def cells(
    contents: Iterable[Contents], rollout: str, generation: Generation, second: int, arm: str
) -> Iterator[Any]:
    """Cells of one second that are this generation's, of the versions under test."""
    if second < generation.evidence_from:
        return
    for each in contents:
        for population, found in each.get(second, {}).items():
            name, number, of, version, differs = population
            if name != rollout or of != arm:
                continue
            if number is None and second < generation.start_second:
                continue
            if number is not None and number != generation.number:
                continue
            if version is not None and version != VERSIONS[arm]:
                continue
            if differs == MAY_DIFFER[arm] or not any("kl_lower" in one["measures"] for one in found.values()):
                yield found
                continue
            # Scored, but not what is under test: only what never became a pair counts.
            whole = found.get(("all", ""), {"counters": {}})["counters"]
            lost = {name: count for name, count in whole.items() if name not in ("pairs", "renormalised")}
            yield {("all", ""): {"counters": lost, "measures": {}}}


def judged(evidence: Evidence, rollout: str, generation: Generation, second: int) -> Judged:
    """Every rule of `workload.policy` with its windows ending at `second`."""
    window = range(second - w.WINDOW_S + 1, second + 1)
    divergence: dict[Scope, list[int]] = {("all", ""): [0, 0]}
    expected = scored = pairs = 0
    slow = [0, 0]
    for at in window:
        for found in cells(evidence.logits, rollout, generation, at, "canary"):
            for scope, cell in found.items():
                measured = cell["measures"].get("kl_lower")
                if measured is not None and scope[0] in DIMENSIONS.values():
                    total = divergence.setdefault(scope, [0, 0])
                    total[0] += measured["count"]
                    total[1] += measured["sum"]
            counters = found.get(("all", ""), {"counters": {}})["counters"]
            done = counters.get("pairs", 0) + counters.get("renormalised", 0)
            scored += done
            expected += done + counters.get("dropped", 0)
            expected += sum(
                count
                for name, count in counters.items()
                if name.startswith("unmatched.") and name != "unmatched.duplicate"
            )
            if at == second:
                pairs += counters.get("pairs", 0)
        for found in cells(evidence.logits, rollout, generation, at, "baseline"):
            # A baseline's half that its producer dropped is a pair that never came to be.
            expected += found.get(("all", ""), {"counters": {}})["counters"].get("dropped", 0)
        for found in cells(evidence.requests, rollout, generation, at, "canary"):
            measured = found.get(("all", ""), {"measures": {}})["measures"].get("ttft_us")
            if measured is not None:
                slow[0] += measured["count"]
                slow[1] += sum(
                    count for k, count in measured["bins"].items() if edges("latency")[k] >= w.SLOW_US
                )
    evaluations = {
        ("divergence", _label(scope)): _mean(count, total, w.DIVERGENCE_LIMIT, 2**30)
        for scope, (count, total) in divergence.items()
    }
    evaluations["slow-share", "rollout"] = _mean(slow[0], slow[1], w.SLOW_SHARE, 1)
    low = expected >= w.MIN_SAMPLES and scored < Fraction(str(w.COVERAGE_LIMIT)) * expected
    verdict = "not_enough_data" if expected < w.MIN_SAMPLES or low else "pass"
    evaluations["coverage", "rollout"] = (scored / expected if expected else None, expected, verdict)
    return Judged(second, evaluations, low, pairs)


def _label(scope: Scope) -> str:
    return "rollout" if scope[0] == "all" else f"{scope[0]}={scope[1]}"


def _mean(count: int, total: int, limit: float, unit: int) -> tuple[float | None, int, str]:
    if count == 0:
        return (None, 0, "not_enough_data")
    over = total > Fraction(str(limit)) * unit * count
    verdict = "not_enough_data" if count < w.MIN_SAMPLES else "trip" if over else "pass"
    return (total / count / unit, count, verdict)


def expected_decisions(
    evidence: Evidence, traffic: w.Traffic, generation: Generation, through: int
) -> list[tuple[str, Judged]]:
    """(kind, what was known) of every decision on complete seconds up to `through`, ending with a trip."""
    found: list[tuple[str, Judged]] = []
    step, step_start, step_pairs = 0, generation.start_second, 0
    holding = advised = False
    observed = traffic.fault == "observed"
    for second in range(generation.evidence_from, through + 1):
        now = judged(evidence, traffic.rollout, generation, second)
        step_pairs += now.pairs if second >= step_start else 0
        divergence, slow = now.verdict("divergence"), now.verdict("slow-share")
        coverage = now.evaluations["coverage", "rollout"][2]
        if slow == "trip" or (divergence == "trip" and not observed):
            found.append(("trip", now))
            return found
        if now.coverage_low != holding and (now.coverage_low or coverage == "pass"):
            holding = now.coverage_low
            found.append(("hold" if holding else "close", now))
        elif divergence == "trip" and not advised:
            advised = True
            found.append(("advise", now))
        elif (
            slow == "pass"
            and (divergence == "pass" or observed)
            and coverage == "pass"
            and second >= step_start + JOIN_TIMEOUT_S + w.WINDOW_S
            and step_pairs >= w.MIN_PAIRS
        ):
            if step + 1 == len(w.STEPS):
                found.append(("promote", now))
                return found
            # The step lasts from the log time at which this second was complete: nobody knew of it before.
            step, step_start, step_pairs = step + 1, second + 1 + LATENESS_S, 0
            found.append(("step", now))
    return found


def generations(actual: list[dict[str, Any]]) -> list[tuple[Generation, list[dict[str, Any]], int | None]]:
    """(generation, its decisions without the command's, newest second folded in it or None if it runs)."""
    found: list[tuple[Generation, list[dict[str, Any]], int | None]] = []
    for decision in actual:
        inputs = decision["inputs"]
        if decision["kind"] == "command":
            if found:
                found[-1] = (found[-1][0], found[-1][1], inputs["complete_through"])
            began = Generation(
                decision["directive"]["generation"], inputs["now_us"], inputs["complete_through"]
            )
            found.append((began, [], None))
        elif decision["kind"] != "refused":
            found[-1][1].append(decision)
    return found


def is_fresh(decision: dict[str, Any]) -> bool:
    """Whether it rests on evidence of open seconds."""
    return any(name.startswith("~") for name in decision["inputs"]["offsets"])


def differences(evidence: Evidence, traffic: w.Traffic, actual: list[dict[str, Any]]) -> list[Finding]:
    """Where a roll-out's decisions are not the expected ones; empty if they are."""
    found: list[Finding] = []
    runs = generations(actual)
    wanted = 2 if traffic.fault == "twice" else 1
    if [run[0].number for run in runs] != list(range(1, wanted + 1)):
        text = f"{traffic.rollout}: generations {[run[0].number for run in runs]}, expected 1..{wanted}"
        return [Finding("wrong", text)]
    for generation, said, folded in runs:
        where = f"{traffic.rollout} generation {generation.number}"
        trips = [decision for decision in said if decision["kind"] == "trip"]
        # After a trip on fresh evidence the next generation may begin before those seconds are complete.
        early = folded is None or any(map(is_fresh, said))
        through = evidence.complete_through if early or folded is None else folded
        # A gate that came back to nothing but final generations has folded nothing when the next one begins;
        # what its predecessor decided had been folded all the same.
        through = max([through, *(decision["inputs"]["complete_through"] for decision in said)])
        expected = expected_decisions(evidence, traffic, generation, through)
        due = any(kind == "trip" for kind, _ in expected)
        if len(trips) != due:
            kind: Kind = "missed_trip" if len(trips) < due else "doubled" if due else "false_trip"
            text = f"{where}: {len(trips)} trips, expected {int(due)}"
            found.append(Finding(kind, text, abs(len(trips) - due)))
        if due and traffic.fault not in TRIPPING:
            found.append(Finding("wrong", f"{where}: the oracle trips a healthy canary"))
        found += _compare(where, expected, said)
    return found


def _compare(where: str, expected: list[tuple[str, Judged]], said: list[dict[str, Any]]) -> list[Finding]:
    """Kinds, seconds and window values of one generation's decisions."""
    found: list[Finding] = []
    fresh = [decision for decision in said if is_fresh(decision)]
    if any(decision["kind"] != "trip" for decision in fresh) or len(fresh) > 1:
        text = f"{where}: on fresh evidence {[decision['kind'] for decision in fresh]}"
        found.append(Finding("wrong", text))
    if fresh:
        # It came before the complete seconds that would have said the same.
        through = fresh[0]["inputs"]["complete_through"]
        if said[-1] is not fresh[0]:
            found.append(Finding("wrong", f"{where}: decided after its trip"))
        if expected and expected[-1][0] == "trip" and expected[-1][1].second <= through:
            text = f"{where}: second {expected[-1][1].second} should have tripped before {through}"
            found.append(Finding("wrong", text))
        expected = [each for each in expected if each[1].second <= through]
    complete = [decision for decision in said if not is_fresh(decision)]
    kinds = [(decision["kind"], decision["inputs"]["complete_through"]) for decision in complete]
    wanted = [(kind, now.second) for kind, now in expected]
    if kinds != wanted:
        found.append(Finding("wrong", f"{where}: decided {kinds}, expected {wanted}"))
        return found
    for decision, (kind, now) in zip(complete, expected, strict=True):
        values = {
            (each["rule"], each["scope"]): (each.get("value"), each.get("samples", 0), each["verdict"])
            for each in decision["evaluations"]
        }
        if values != now.evaluations:
            wrong = {
                key: (values.get(key), now.evaluations.get(key))
                for key in sorted(values.keys() | now.evaluations.keys())
                if values.get(key) != now.evaluations.get(key)
            }
            found.append(Finding("wrong", f"{where}: {kind} at {now.second}: (said, expected) {wrong}"))
    return found
