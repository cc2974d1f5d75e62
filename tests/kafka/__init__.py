"""Real brokers and real worker processes for the tests."""
