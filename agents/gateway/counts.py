"""What a gateway counts, by closed lists of names: nothing that traffic says becomes a name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from enum import StrEnum


class Request(StrEnum):
    """What became of a user's request."""

    ANSWERED = "answered"
    """Whole, whatever the engine said."""
    CLIENT_GONE = "client_gone"
    """Its user hung up first."""
    CUT = "cut"
    """The engine's answer broke off, or fell silent, after it had begun."""
    ENGINE_AWAY = "engine_away"
    """502: no engine could be reached, or it hung up without an answer."""
    ENGINE_SILENT = "engine_silent"
    """504."""
    NO_ROUTE = "no_route"
    """503: every engine is out."""
    FULL = "full"
    """503: as many requests are under way as this gateway takes."""
    STOPPED = "stopped"
    """Cut off, because the gateway's time to end was over."""
    NOT_FOUND = "not_found"
    WRONG_METHOD = "wrong_method"
    TOO_LARGE = "too_large"
    BAD_REQUEST = "bad_request"
    """400: what came is no HTTP request, or did not come whole in time."""
    DEFECT = "defect"
    """500: a defect of the gateway's."""


class Note(StrEnum):
    """What happened on a request's way besides."""

    NOT_UNDERSTOOD = "not_understood"
    """Its body is none that is read: passed on untouched, no events."""
    RETRIED = "retried"
    """Another engine was asked, because the one before could not be reached."""
    HUNG_UP = "hung_up"
    """An engine hung up before a byte of its answer; it was asked once more, over a new connection."""
    ASKED_PLAIN = "asked_plain"
    """The engine refused what was asked for besides; it was asked again as the user had."""
    UNMEASURED = "unmeasured"
    """A defect while an answer was measured: its user got it, no event came of it."""


class Mirror(StrEnum):
    """What became of a mirrored request, or of one of its copies."""

    MIRRORED = "mirrored"
    """Decided: copies are to be made."""
    ANSWERED = "answered"
    """A copy, whole."""
    FAILED = "failed"
    """A copy that its engine did not answer, or not well; its event says so."""
    TIMED_OUT = "timed_out"
    """A copy given up after gateway.mirror.timeout_s."""
    QUEUE_FULL = "queue_full"
    """Dropped before its copies were made, and reported; so are the next."""
    OVERDUE = "overdue"
    """It waited too long for its turn."""
    UNSCORABLE = "unscorable"
    """The baseline gave no answer that could be scored."""
    STOPPED = "stopped"
    """The gateway ended first."""


class Counts:
    """Since the start. All names are there from the beginning, so that they can be seen to rise."""

    def __init__(self) -> None:
        self.requests: Counter[Request] = Counter()
        self.notes: Counter[Note] = Counter()
        self.mirrors: Counter[Mirror] = Counter()
        self.no_logits: Counter[str] = Counter()
        self.texts: Counter[str] = Counter()
        """Texts that stayed, by reason, and those that were sealed."""

    def gauges(self) -> dict[str, Mapping[str, int]]:
        """By what is counted, then by name."""
        return {
            "gateway_requests": {each.value: self.requests[each] for each in Request},
            "gateway_notes": {each.value: self.notes[each] for each in Note},
            "gateway_mirrors": {each.value: self.mirrors[each] for each in Mirror},
            "gateway_no_logits": dict(self.no_logits),
            "gateway_texts": dict(self.texts),
        }
