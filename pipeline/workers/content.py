"""The configured settings that shape content, in the core's units."""

from __future__ import annotations

from pipeline.config import ContentConfig
from pipeline.core.source import ContentSettings


def content_settings(content: ContentConfig) -> ContentSettings:
    """What every source is made with; its hash goes with every bucket."""
    return ContentSettings(
        lateness_us=content.lateness_s * 1_000_000,
        join_timeout_us=content.join_timeout_s * 1_000_000,
        cells_per_bucket=content.cells_per_bucket,
    )
