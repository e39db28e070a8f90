"""Features of a round: one file each, with the aggregator's side and the nodes' side."""
