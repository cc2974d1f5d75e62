"""Klaxon's pipeline: pure decisions in `core`, thin shells around it."""
