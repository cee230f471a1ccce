"""What executes a graph or an artifact on this PC."""
