"""Policies that ship with Klaxon, as YAML."""
