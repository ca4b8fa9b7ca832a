"""Read-only views of the Plan, of counters and of status pages."""
