"""Who answers a request, and who could be sent copies of it. Pure.

A request's place among the weights is a hash of roll-out and session, a point in [0, 1): the canary has the
points below its weight, everything else is the baseline's. So nobody leaves the canary while its weight grows
and nobody comes to it while it shrinks. In doubt the baseline answers: it is never without an engine.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum
from math import ceil
from typing import Final

from agents.gateway.segments import NO_EXCLUSIONS, Exclusions, Traffic
from agents.gateway.settings import EngineSettings, PoolSettings
from agents.router.core import Effective
from schemas.events import ARMS, Arm
from schemas.versions import version_keys

Load = Callable[[str], int]
"""Requests in flight on a node."""
_WHOLE: Final = 1 << 64
_MASK: Final = _WHOLE - 1
_NONE: Final[frozenset[str]] = frozenset()
FEW_IN_FLIGHT: Final = 4
"""An engine with fewer requests in flight than this keeps its sessions, however idle the others are."""


class Why(StrEnum):
    """What decided the arm."""

    WEIGHTS = "weights"
    """The directive's weights, and the request's place among them."""
    NO_DIRECTIVE = "no_directive"
    """None is known yet: the fallback version."""
    EXCLUDED = "excluded"
    """The version under test gets nothing of this class of traffic."""
    UNKNOWN_VERSION = "unknown_version"
    """Its place is one of a version that no pool has: the baseline."""
    NO_NODE = "no_node"
    """The version under test has no engine for it: ejected, excluded or tried in vain."""


@dataclass(frozen=True, slots=True)
class Route:
    """One engine of one arm, and the directive by which it was chosen."""

    pool: PoolSettings
    engine: EngineSettings
    generation: int | None
    """Of the directive; None: none is known."""
    why: Why

    @property
    def arm(self) -> Arm:
        """The pool's."""
        return self.pool.arm


@dataclass(frozen=True, slots=True)
class NoRoute:
    """Every engine that may answer was tried already."""


@dataclass(frozen=True, slots=True)
class _Node:
    engine: EngineSettings
    seed: int


class Routing:
    """What the last directive means for requests. Holds nothing of them but counts by enum."""

    def __init__(
        self, pools: Sequence[PoolSettings], rollout: str, *, fallback: str = "", load_factor: float = 1.25
    ) -> None:
        """`pools`: as `settings.faults` finds nothing wrong with. `fallback`: a version as directives write
        it, which gets everything while there is no directive; "": the baseline's."""
        self._salt = _framed(rollout.encode())
        self._pools: dict[Arm, PoolSettings] = {pool.arm: pool for pool in pools}
        self._keys = version_keys(self._pools)
        self._fallback = fallback
        self._load_factor = load_factor
        self._nodes: dict[Arm, tuple[_Node, ...]] = {
            pool.arm: tuple(_Node(engine, _seed(engine.node)) for engine in pool.engines) for pool in pools
        }
        self._canaries = frozenset(node.engine.node for node in self._nodes.get("canary", ()))
        self._counts: Counter[Why] = Counter()
        self.obey(None, None)

    def obey(self, effective: Effective | None, generation: int | None) -> None:
        """From now on route by this. None: no directive is known.

        Ejected nodes get nothing and no copies. Were that all of the baseline's, it keeps them all: users are
        answered by a bad engine sooner than by none.
        """
        self._generation = generation
        self._known = effective is not None and bool(effective.weights)
        self._mirrors = self._known and effective is not None and not effective.aborted
        weights = {} if effective is None else effective.weights
        if effective is None and self._fallback:
            weights = {self._fallback: 100.0}
        routed = {self._keys[arm] for arm in ("baseline", "canary") if arm in self._keys}
        self.unknown_versions = tuple(
            sorted(version for version, weight in weights.items() if weight > 0 and version not in routed)
        )
        """Versions with weight that no pool has: the baseline answers for them."""
        share = weights.get(self._keys["canary"], 0.0) if "canary" in self._keys else 0.0
        unknown = sum(weights[version] for version in self.unknown_versions)
        self._below = _place_of(share)
        self._unknown_below = _place_of(share + unknown)
        ejected = _NONE if effective is None else frozenset(effective.ejected_nodes)
        self._exclusions = NO_EXCLUSIONS if effective is None else Exclusions.of(effective.excluded_segments)
        self._open = {
            arm: tuple(node for node in nodes if node.engine.node not in ejected)
            for arm, nodes in self._nodes.items()
        }
        self.ejections_ignored = not self._open["baseline"]
        """Whether every engine of the baseline is ejected, so that none is."""
        if self.ejections_ignored:
            self._open["baseline"] = self._nodes["baseline"]

    def route(
        self,
        key: bytes,
        traffic: Traffic | None,
        load: Load,
        tried: Set[str] = _NONE,
        avoided: Set[str] = _NONE,
    ) -> Route | NoRoute:
        """Who answers. `key`: session, user or request id. `traffic` None: nothing is known of the request.

        `tried`: nodes that this request found unreachable. Once one of the canary's is among them the
        baseline answers: whoever met a version under test that is away is answered with the next try.
        `avoided`: nodes that others found unreachable lately. They come last: where the canary has no other
        the baseline answers, and where that has no other they are tried.
        """
        point, place = self._points(key)
        why = Why.WEIGHTS if self._known else Why.NO_DIRECTIVE
        if point < self._below:
            if self._exclusions.hold(traffic, self._pools["canary"]):
                why = Why.EXCLUDED
            else:
                nodes = _without(self._left("canary", traffic), avoided)
                if nodes and tried.isdisjoint(self._canaries):
                    return self._routed("canary", nodes, place, load, why)
                why = Why.NO_NODE
        elif point < self._unknown_below:
            why = Why.UNKNOWN_VERSION
        nodes = _without(self._left("baseline", traffic), tried)
        nodes = _without(nodes, avoided) or nodes
        return self._routed("baseline", nodes, place, load, why) if nodes else NoRoute()

    def shadows(
        self,
        primary: Route,
        key: bytes,
        traffic: Traffic | None,
        load: Load,
        avoided: Set[str] = _NONE,
    ) -> tuple[Route, ...]:
        """One engine of each other arm that may be sent a copy, in the order of ARMS.

        None without a directive, for it may eject or exclude what is not known yet, nor after an abort. A
        canary gets no copy of what it would get no request of: the gate takes evidence of excluded classes
        out, as far as it can, until none comes. Fewer than asked for where an arm has no engine left; where
        all are `avoided` the copy goes to one of them: nobody waits for it, and its failure is evidence.
        """
        if not self._mirrors:
            return ()
        _, place = self._points(key)
        found = []
        for arm in ARMS:
            if arm == primary.arm or arm not in self._pools:
                continue
            if arm == "canary" and self._exclusions.hold(traffic, self._pools[arm]):
                continue
            nodes = self._left(arm, traffic)
            nodes = _without(nodes, avoided) or nodes
            if nodes:
                engine = self._choose(nodes, place, load)
                found.append(Route(self._pools[arm], engine, self._generation, primary.why))
        return tuple(found)

    def gauges(self) -> dict[str, int]:
        """Decisions by what decided, since the start, and what of the directive cannot be followed."""
        return {
            **{f"routed_{why}": self._counts[why] for why in Why},
            "unknown_versions": len(self.unknown_versions),
            "excluded_segments_not_understood": self._exclusions.not_understood,
            "ejections_ignored": int(self.ejections_ignored),
        }

    def _routed(self, arm: Arm, nodes: Sequence[_Node], place: int, load: Load, why: Why) -> Route:
        self._counts[why] += 1
        return Route(self._pools[arm], self._choose(nodes, place, load), self._generation, why)

    def _left(self, arm: Arm, traffic: Traffic | None) -> tuple[_Node, ...]:
        """Engines of an arm that may take this request."""
        nodes = self._open[arm]
        if arm == "canary" and self._exclusions.by_node:
            nodes = tuple(node for node in nodes if not self._exclusions.hold_on(traffic, node.engine.node))
        return nodes

    def _choose(self, nodes: Sequence[_Node], place: int, load: Load) -> EngineSettings:
        """The first in the key's own order of engines whose load is under the bound (rendezvous hashing).

        The bound is the factor times the mean with this request, so at least one engine is under it; but
        never under FEW_IN_FLIGHT, or a session's second request would already lose its prefix cache.
        """
        if len(nodes) == 1:
            return nodes[0].engine
        loads = [load(node.engine.node) for node in nodes]
        bound = max(FEW_IN_FLIGHT, ceil(self._load_factor * (sum(loads) + 1) / len(nodes)))
        free = [node for node, held in zip(nodes, loads, strict=True) if held < bound]
        return max(free, key=lambda node: _mixed(node.seed ^ place)).engine

    def _points(self, key: bytes) -> tuple[int, int]:
        """A key's place among weights and its place among engines: independent of each other."""
        digest = hashlib.sha256(self._salt + _framed(key)).digest()
        return int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:16], "big")


def _without(nodes: tuple[_Node, ...], these: Set[str]) -> tuple[_Node, ...]:
    return tuple(node for node in nodes if node.engine.node not in these) if these else nodes


def _place_of(percent: float) -> int:
    """The first point that is not below this share of all points."""
    return min(round(percent / 100 * _WHOLE), _WHOLE)


def _framed(part: bytes) -> bytes:
    return len(part).to_bytes(4, "big") + part


def _seed(node: str) -> int:
    return int.from_bytes(hashlib.sha256(node.encode()).digest()[:8], "big")


def _mixed(value: int) -> int:
    """splitmix64's finalizer."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
