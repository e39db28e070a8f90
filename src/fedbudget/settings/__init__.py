"""Settings of a run, and the options of aggregators and nodes."""
