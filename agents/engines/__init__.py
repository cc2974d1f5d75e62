"""What an engine that serves a model answers, and whether that is enough to compare it."""
