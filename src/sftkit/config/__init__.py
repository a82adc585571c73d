"""What a recipe may say: its schema, its rules, and the way from YAML and key=value to a frozen Config. No torch."""
