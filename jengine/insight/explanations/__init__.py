"""Rules that find bottlenecks in traces."""
