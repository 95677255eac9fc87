"""Reading run folders: records, tables and reports. Knows nothing of the engine."""
