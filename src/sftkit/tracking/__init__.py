"""What a run reports while it trains: metrics, events, the console, a dashboard."""
