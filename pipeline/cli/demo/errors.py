"""The root of the demo's errors."""

from pipeline.errors import PipelineError


class DemoError(PipelineError):
    """The demo cannot go on; the message names the thing, the place and the remedy."""
