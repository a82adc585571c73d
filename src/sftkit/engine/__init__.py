"""How an optimizer step is computed: the Engine protocol and its engines."""
