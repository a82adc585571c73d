"""Does compiling pay on this recipe, and does it change anything? Real runs, judged criterion by criterion."""
