"""What a run says of itself while it trains: metrics, events, the console, a dashboard."""
