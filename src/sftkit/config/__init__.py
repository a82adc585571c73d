"""The contents of a recipe and a command line: schema, rules, the way from YAML and key=value to a frozen Config; how
processes then share the work; and what of any text may reach a terminal. No torch."""
