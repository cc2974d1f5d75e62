"""How far the archive is behind in a partition, and whether retention will overtake it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

AT_RISK_BELOW: Final = 0.5
"""Share of the topic's retention: with less than this left for the oldest record, an operator must know."""


@dataclass(frozen=True, slots=True)
class Standing:
    """One source partition, as the broker and the table say."""

    next_offset: int
    """First record that is not stored."""
    begin_offset: int
    """First record that is retained."""
    end_offset: int
    oldest_append_us: int | None
    """Append time of the first retained record that is not stored; None where there is none."""
    retention_us: int | None
    """How long the topic keeps a record; None: without end, or not known."""


@dataclass(frozen=True, slots=True)
class Lag:
    """What an operator watches."""

    lag_records: int
    """Offsets between what is stored and the end: an upper bound of records."""
    behind_us: int
    """Age of the oldest record that is not stored; 0 where everything is."""
    retention_left_us: int | None
    """Until the broker may delete that record."""
    deleted_records: int
    """Offsets that are gone without being stored."""
    at_risk: bool

    def gauges(self) -> dict[str, int]:
        """By name; a topic that keeps everything has no `retention_left_us`."""
        left = {} if self.retention_left_us is None else {"retention_left_us": self.retention_left_us}
        return {
            "lag_records": self.lag_records,
            "behind_us": self.behind_us,
            "deleted_records": self.deleted_records,
            "retention_at_risk": int(self.at_risk),
            **left,
        }


def lag_of(standing: Standing, now_us: int) -> Lag:
    """The lag at this time. A record from the future (the broker's clock is ahead) is 0 µs old."""
    deleted = max(0, min(standing.begin_offset, standing.end_offset) - standing.next_offset)
    if standing.oldest_append_us is None:
        # Markers and aborted records may stand there, but nothing to store.
        return Lag(0, 0, standing.retention_us, deleted, deleted > 0)
    behind_us = max(0, now_us - standing.oldest_append_us)
    left_us = None if standing.retention_us is None else max(0, standing.retention_us - behind_us)
    scarce = (
        left_us is not None
        and standing.retention_us is not None
        and left_us < AT_RISK_BELOW * standing.retention_us
    )
    lag = max(0, standing.end_offset - standing.next_offset)
    return Lag(lag, behind_us, left_us, deleted, scarce or deleted > 0)


def risk_line(place: str, lag: Lag, others: int) -> str:
    """One line for the worst partition: what is the matter, and what to do. `others`: how many more."""
    more = f" (and {others} partitions more)" if others else ""
    if lag.deleted_records:
        return (
            f"{place}{more}: {lag.deleted_records} offsets were deleted before they were archived; bring "
            "ClickHouse back, or lengthen the topic's retention.ms"
        )
    behind_s, left_s = lag.behind_us / 1_000_000, (lag.retention_left_us or 0) / 1_000_000
    return (
        f"{place}{more}: {lag.lag_records} records are not archived, the oldest for {behind_s:.0f} s; "
        f"the topic deletes it in {left_s:.0f} s: bring ClickHouse back, or lengthen the topic's retention.ms"
    )
