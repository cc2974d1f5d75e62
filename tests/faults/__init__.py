"""Workers, brokers and ClickHouse broken on purpose."""
