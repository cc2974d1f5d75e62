"""`klaxon demo`: the whole pipeline on one machine, one drill scenario, answers of a real model."""
