"""Tests of the workers: transport, shells, topics."""
