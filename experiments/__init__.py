"""What a person runs: launch, sweep, table, plot, footprint; one folder a study."""
