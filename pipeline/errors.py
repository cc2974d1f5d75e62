"""The root of every error that `pipeline` raises."""


class PipelineError(Exception):
    """Something a user or operator can mend. The message names the thing, the place and the remedy."""
