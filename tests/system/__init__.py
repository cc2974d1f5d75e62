"""Real processes on real Apache Kafka, judged by the offline oracle."""
