"""Questions and texts generated on the machine, so that the first chain needs no download."""
