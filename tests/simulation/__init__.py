"""What the shipped policy does on real pair scores: false trips, delays, trips per day."""
