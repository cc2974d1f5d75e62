"""The gateway: forwards what users ask, mirrors copies, measures, captures, publishes; no user notices."""
