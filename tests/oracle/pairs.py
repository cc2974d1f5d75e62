"""Pairing of halves by one pass over the whole log of a logits partition.

Two places of the log are *near* if they are at most J of log time and at most 256 MiB of records apart, and
*close* if they are at most twice that. Halves with one key (roll-out, signature, pair id) form runs: each is
close (without a pair id: near) to the one before it. The first of a run opens the run's group; whatever is
near the first belongs to the group, what comes later is too late.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any

from tests.oracle.cells import Contents, Population, Seconds, marginals, node_contexts
from tests.oracle.divergence import score
from tests.oracle.log import AHEAD_US, Record, Settings, closed_only, drops, is_open, with_log_time

ARMS = ("baseline", "canary", "control")
VERSIONS = ("model_version", "prompt_version", "data_version", "system_version")
SHIFT = round(0.1 * 2**30)
Half = dict[str, Any]


def logit_seconds(records: Sequence[Record], settings: Settings, closed: bool = True) -> Contents:
    """Closed seconds → population → cell, of one partition of the logits."""
    return logit_content(records, settings, closed)[0]


def logit_content(
    records: Sequence[Record], settings: Settings, closed: bool = True
) -> tuple[Contents, list[Half]]:
    """Closed seconds, and every scored pair in the order in which they were formed."""
    happenings, pairs = _happenings(records, settings)
    seconds = Seconds(settings.cells_per_bucket)
    for _, row in sorted(happenings, key=lambda h: h[0]):
        seconds.row(**row)
    contents = seconds.contents
    return (closed_only(contents, records, settings) if closed else contents), pairs


def _halves(records: Sequence[Record]) -> tuple[list[Half], list[tuple[int, int]]]:
    """All halves in log order, and the (log time, bytes through) of every record."""
    halves: list[Half] = []
    places: list[tuple[int, int]] = []
    bytes_through = 0
    for index, (log_us, each) in enumerate(with_log_time(records)):
        bytes_through += each["size_bytes"]
        if each["events"] is not None:
            bytes_through += 8_192 + 1_536 * len(each["events"])
        places.append((log_us, bytes_through))
        for position, event in enumerate(each["events"] or ()):
            end_us = min(event["ts_us"] + event["duration_us"], each["append_us"] + AHEAD_US)
            halves.append(
                {
                    "event": event,
                    "place": (log_us, bytes_through),
                    "at": (index, 2, position),
                    "end_us": end_us,
                    "where": (each["offset"], position),
                }
            )
    return halves, places


def _happenings(
    records: Sequence[Record], settings: Settings
) -> tuple[list[tuple[tuple[int, ...], dict[str, Any]]], list[Half]]:
    """((record, phase, …) order, row) for everything that counts somewhere; and all scored pairs."""
    halves, places = _halves(records)

    def near(a: tuple[int, int], b: tuple[int, int], times: int = 1) -> bool:
        time_left = times * settings.join_timeout_us - (b[0] - a[0])
        return time_left >= 0 and b[1] - a[1] <= times * settings.waiting_bytes

    by_key: dict[Any, list[Half]] = {}
    for half in halves:
        event = half["event"]
        by_key.setdefault((event["rollout"], event["signature"], event.get("pair_id")), []).append(half)
    happenings: list[tuple[tuple[int, ...], dict[str, Any]]] = []
    pairs: list[Half] = []
    for key, members in by_key.items():
        runs: list[list[Half]] = []
        for half in members:
            if runs and near(runs[-1][-1]["place"], half["place"], 1 if key[2] is None else 2):
                runs[-1].append(half)
            else:
                runs.append([half])
        for run in runs:
            _run(run, key[2] is None, places, near, settings, happenings, pairs)
    reported = drops(records)
    for index, (log_us, each) in enumerate(with_log_time(records)):
        for n, (rollout, arm, count) in enumerate(reported.get(each["offset"], ())):
            row = _count(log_us, (rollout, None, arm, None, 0), "dropped", count)
            happenings.append(((index, 1, n), row))
    return happenings, sorted(pairs, key=lambda pair: pair["order"])


def _count(log_us: int, population: Population, name: str, n: int) -> dict[str, Any]:
    return {
        "second": log_us // 1_000_000,
        "population": population,
        "cells": [("all", "")],
        "totals": {name: n},
    }


def _run(
    run: list[Half], anonymous: bool, places: Any, near: Any, settings: Settings, happenings: Any, pairs: Any
) -> None:
    """One run of halves of one key."""
    first = run[0]
    group: list[Half] = []
    complete = False
    formed: dict[str, Any] = {}
    for n, half in enumerate(run):
        event = half["event"]
        log_us = half["place"][0]
        again = any(
            _same(earlier["event"], event, anonymous)
            and near(earlier["place"], half["place"], 1 if anonymous else 2)
            for earlier in run[:n]
        )
        own: Population = (event["rollout"], event.get("generation"), event["arm"], event["model_version"], 0)
        if again:
            happenings.append((half["at"], _count(log_us, own, "unmatched.duplicate", 1)))
        elif complete or not near(first["place"], half["place"]):
            reason = "unmatched.ambiguous" if anonymous else "unmatched.late"
            happenings.append((half["at"], _count(log_us, own, reason, 1)))
        else:
            group.append(half)
            if not anonymous:
                order = half["at"]
                for b, x in _partners(group, half):
                    order = (*order, 0)
                    _form(b, x, log_us, order, None, formed, settings, happenings, pairs)
                present = {member["event"]["arm"] for member in group}
                wanted = {"baseline"} | present | {a for m in group for a in m["event"]["expected_arms"]}
                complete = present == wanted and len(wanted) > 1
    if complete:
        return
    end = next((i for i, place in enumerate(places) if not near(first["place"], place)), None)
    if end is None:
        return
    ended_us = min(first["place"][0] + settings.join_timeout_us, places[end][0])
    _resolve(group, anonymous, ended_us, (end, 0, *first["at"]), formed, settings, happenings, pairs)


def _same(a: dict[str, Any], b: dict[str, Any], anonymous: bool) -> bool:
    names = ("arm", "node", "ts_us") if anonymous else ("arm",)
    return all(a[name] == b[name] for name in names)


def _partners(group: list[Half], half: Half) -> list[tuple[Half, Half]]:
    """The (baseline, x) that the newest half makes possible, canary before control."""
    arm = half["event"]["arm"]
    by_arm = {member["event"]["arm"]: member for member in group}
    if arm == "baseline":
        return [(half, by_arm[x]) for x in ARMS[1:] if x in by_arm]
    return [(by_arm["baseline"], half)] if "baseline" in by_arm else []


def _resolve(
    group: Any,
    anonymous: bool,
    ended_us: int,
    order: Any,
    formed: Any,
    settings: Any,
    happenings: Any,
    pairs: Any,
) -> None:
    """The group's time is up."""
    by_arm: dict[str, list[Half]] = {}
    for half in group:
        by_arm.setdefault(half["event"]["arm"], []).append(half)
    expected = {arm for half in group for arm in half["event"]["expected_arms"]}
    ambiguous = any(len(found) > 1 for found in by_arm.values())
    opener = group[0]["event"]
    for at, arm in enumerate(ARMS[1:]):
        if arm not in expected and arm not in by_arm:
            continue
        theirs, ours = by_arm.get(arm, []), by_arm.get("baseline", [])
        version = theirs[0]["event"]["model_version"] if theirs else None
        generation = theirs[0]["event"].get("generation") if theirs else None
        if generation is None:
            generation = opener.get("generation")
        population = (opener["rollout"], generation, arm, version, 0)
        if ambiguous:
            row = _count(ended_us, population, "unmatched.ambiguous", max(len(theirs), len(ours)))
        elif not theirs:
            row = _count(ended_us, population, f"unmatched.no_{arm}", 1)
        elif not ours:
            row = _count(ended_us, population, "unmatched.no_baseline", 1)
        elif anonymous:
            second = ended_us // 1_000_000
            _form(ours[0], theirs[0], ended_us, (*order, at), second, formed, settings, happenings, pairs)
            continue
        else:
            continue
        happenings.append(((*order, at), row))


def _form(
    b: Half,
    x: Half,
    log_us: int,
    order: Any,
    fixed: int | None,
    formed: Any,
    settings: Settings,
    happenings: Any,
    pairs: Any,
) -> None:
    """Score (baseline, x); `fixed`: the second it counts in, where it is not that of its completion."""
    base, event = b["event"], x["event"]
    result = score(base, event)
    generation = event.get("generation")
    if generation is None:
        generation = base.get("generation")
    differs = sum(2**n for n, name in enumerate(VERSIONS) if base.get(name) != event.get(name))
    population = (event["rollout"], generation, event["arm"], event["model_version"], differs)
    if result["outcome"] != "scored":
        row = _count(log_us, population, f"unmatched.{result['outcome']}", 1)
        happenings.append((order, row))
        formed[event["arm"]] = None
        return
    end_us = max(b["end_us"], x["end_us"])
    second = _second(end_us, log_us, fixed, settings)
    cells = [*marginals(event), *node_contexts(event)]
    name = _identity(event)
    if second is None:
        row = _count(log_us, population, "unmatched.late", 1)
    elif result["logits"]:
        row = {
            "second": second,
            "population": population,
            "cells": cells,
            "counters": {"renormalised": 1},
            "measures": {"kl_renormalised": result["kl_lower"]},
        }
    else:
        measured = ("kl_lower", "kl_floor", "js_lower", "tv_lower", "cosine", "top1_agree", "positions")
        row = {
            "second": second,
            "population": population,
            "cells": cells,
            "counters": {"pairs": 1},
            "measures": {each: result[each] for each in measured},
            "worst": (result["kl_lower"], name),
        }
    happenings.append((order, row))
    kl = None if result["logits"] else result["kl_lower"]
    formed[event["arm"]] = {"kl": kl, "end_us": end_us, "population": population, "cells": cells}
    pairs.append(
        {
            "order": order,
            "late": second is None,
            "formed_us": log_us,
            "event_us": end_us,
            "first": min(b["where"], x["where"]),
            "name": name,
            "arm": event["arm"],
            "result": result,
        }
    )
    _excess(formed, log_us, order, fixed, settings, happenings)


def _excess(
    formed: Any, log_us: int, order: Any, fixed: int | None, settings: Settings, happenings: Any
) -> None:
    """Canary minus control, once both are scored; in the cells of the canary."""
    canary, control = formed.get("canary"), formed.get("control")
    if not canary or not control or canary["kl"] is None or control["kl"] is None:
        return
    second = _second(max(canary["end_us"], control["end_us"]), log_us, fixed, settings)
    if second is None:
        return
    row: dict[str, Any] = {"second": second, "population": canary["population"], "cells": canary["cells"]}
    if control["kl"] > SHIFT:
        row["counters"] = {"excess_left_out": 1}
    else:
        row["measures"] = {"excess": canary["kl"] - control["kl"] + SHIFT}
    happenings.append(((*order, 1), row))


def _second(end_us: int, log_us: int, fixed: int | None, settings: Settings) -> int | None:
    if fixed is not None:
        return fixed
    second = end_us // 1_000_000
    return second if is_open(second, log_us, settings) else None


def _identity(event: dict[str, Any]) -> bytes:
    """What a pair is called in `worst`: the pair id's 16 bytes, else the signature."""
    pair_id = event.get("pair_id")
    if pair_id is None:
        return bytes.fromhex(event["signature"])
    if re.fullmatch("[0-9a-f]{32}", pair_id):
        return bytes.fromhex(pair_id)
    return hashlib.sha256(pair_id.encode()).digest()[:16]
