"""`klaxon doctor`: a whole installation looked at, and what to do about each finding."""
