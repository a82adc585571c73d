"""Report on a run while it trains: metrics, events, the console, a dashboard."""
