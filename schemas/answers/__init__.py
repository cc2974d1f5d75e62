"""Answers of OpenAI-compatible engines, read whole or a chunk at a time: the one reader of their shapes."""
