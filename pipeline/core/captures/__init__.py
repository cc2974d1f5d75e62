"""Answers with log-probabilities as engines send them: parsing of bodies and comparison of two captures."""
