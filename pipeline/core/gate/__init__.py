"""The gate: windows over buckets, rules, and the machine that turns verdicts into directives. Pure."""
